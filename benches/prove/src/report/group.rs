//! Records that belong together: cases of a study, with their repeated runs.

use super::figures::{self, is_ok};
use super::read::Entry;
use hobbit_programs::bench::record::Record;

/// hobbit's name as an engine.
pub const HOBBIT: &str = "hobbit";
/// The baseline's.
pub const BASELINE: &str = "llama.cpp";

/// The study beside busy processes.
pub const CONTENDED: &str = "contended";
/// The study of whole commands.
pub const FITS: &str = "fits";
/// Studies of long runs.
pub const LONG: [&str; 2] = ["long", "pressure"];

/// A figure of one or several runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Half of the runs have more, half less.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
    /// Runs.
    pub n: usize,
}

impl Spread {
    /// Of the values that are numbers; `None` without any.
    pub fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let n = values.len();
        let (least, most) = (*values.first()?, *values.last()?);
        let median = if n % 2 == 1 { values[n / 2] } else { (values[n / 2 - 1] + values[n / 2]) / 2.0 };
        Some(Self { median, least, most, n })
    }
}

/// What was evaluated, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Test {
    /// Of the prompt.
    pub n_prompt: u32,
    /// One by one.
    pub n_gen: u32,
    /// In the context before.
    pub n_depth: u32,
}

impl std::fmt::Display for Test {
    /// As llama-bench: `pp128+tg32 @ d512`.
    fn fmt(&self, to: &mut std::fmt::Formatter) -> std::fmt::Result {
        let parts = [(self.n_prompt, "pp"), (self.n_gen, "tg")];
        let parts: Vec<_> = parts.iter().filter(|(n, _)| *n > 0).map(|(n, name)| format!("{name}{n}")).collect();
        to.write_str(if parts.is_empty() { "nothing" } else { "" })?;
        to.write_str(&parts.join("+"))?;
        if self.n_depth > 0 { write!(to, " @ d{}", self.n_depth) } else { Ok(()) }
    }
}

/// One thing measured, once or several times.
#[derive(Clone, Debug)]
pub struct Case<'a> {
    /// Name of the model, as tables show it.
    pub model: String,
    /// Bytes of the control group.
    pub limit: Option<u64>,
    /// Other processes that computed meanwhile.
    pub busy: u32,
    /// What was evaluated.
    pub test: Test,
    /// Who did.
    pub engine: &'a str,
    /// What of the study.
    pub variant: &'a str,
    /// hobbit's own flags.
    pub flags: &'a str,
    /// At least one.
    pub runs: Vec<&'a Entry>,
}

impl Case<'_> {
    /// A figure over the runs that ended well.
    pub fn spread(&self, figure: impl Fn(&Record) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.runs.iter().map(|run| &run.record).filter(|record| is_ok(record)).filter_map(figure))
    }

    /// Its median.
    pub fn median(&self, figure: impl Fn(&Record) -> Option<f64>) -> Option<f64> {
        self.spread(figure).map(|spread| spread.median)
    }

    /// The largest of a figure over all runs, however they ended.
    pub fn most(&self, figure: impl Fn(&Record) -> Option<f64>) -> Option<f64> {
        Spread::of(self.runs.iter().filter_map(|run| figure(&run.record))).map(|spread| spread.most)
    }

    /// `ok`, or how it ended, and for how many of the runs.
    pub fn outcome(&self) -> String {
        let bad: Vec<_> = self.runs.iter().map(|run| &run.record).filter(|record| !is_ok(record)).collect();
        match bad.first() {
            None => "ok".into(),
            Some(first) => {
                let how = if first.hobbit_outcome.is_empty() { "failed" } else { &first.hobbit_outcome };
                if self.runs.len() == 1 { how.into() } else { format!("{} of {}: {how}", bad.len(), self.runs.len()) }
            }
        }
    }

    /// Engine and variant in words.
    pub fn name(&self) -> String {
        if self.variant.is_empty() { self.engine.into() } else { format!("{}, {}", self.engine, self.variant) }
    }

    /// Where it was measured and what.
    pub fn place(&self) -> Place<'_> {
        Place { model: &self.model, limit: self.limit, busy: self.busy, test: self.test }
    }
}

/// What two engines must share to be compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place<'a> {
    /// The model.
    pub model: &'a str,
    /// The memory.
    pub limit: Option<u64>,
    /// Other processes that computed meanwhile.
    pub busy: u32,
    /// The tokens.
    pub test: Test,
}

/// The cases with one of some labels, in the order of their first records.
#[derive(Clone, Debug, Default)]
pub struct Study<'a> {
    /// Its cases.
    pub cases: Vec<Case<'a>>,
}

impl<'a> Study<'a> {
    /// What `entries` hold of the studies `labels`.
    pub fn of(entries: &'a [Entry], labels: &[&str]) -> Self {
        let mut cases: Vec<Case<'a>> = Vec::new();
        let of_study: Vec<_> =
            entries.iter().filter(|entry| labels.contains(&entry.record.hobbit_label.as_str())).collect();
        let alone = Alone::of(&of_study);
        for entry in of_study {
            let record = &entry.record;
            let case = Case {
                model: figures::model(record, entries),
                limit: record.hobbit_limit,
                busy: record.hobbit_busy.unwrap_or(0),
                test: alone.test(record),
                engine: &record.hobbit_engine,
                variant: &record.hobbit_variant,
                flags: &record.hobbit_flags,
                runs: vec![entry],
            };
            let same = |other: &&mut Case<'a>| {
                let key = |case: &Case<'a>| (case.engine, case.variant, case.flags);
                other.place() == case.place() && key(other) == key(&case)
            };
            match cases.iter_mut().find(same) {
                Some(known) => known.runs.push(entry),
                None => cases.push(case),
            }
        }
        Self { cases }
    }

    /// Distinct values of a key, in the order of the cases.
    pub fn distinct<K: PartialEq>(&self, key: impl Fn(&Case<'a>) -> K) -> Vec<K> {
        let mut found = Vec::new();
        for key in self.cases.iter().map(key) {
            if !found.contains(&key) {
                found.push(key);
            }
        }
        found
    }

    /// hobbit's cases.
    pub fn hobbit(&self) -> impl Iterator<Item = &Case<'a>> {
        self.cases.iter().filter(|case| case.engine == HOBBIT)
    }

    /// The case of plain llama.cpp that `case` is measured against: that of the same variant if there are several.
    pub fn baseline(&self, case: &Case) -> Option<&Case<'a>> {
        let at_place = || self.cases.iter().filter(|other| other.engine == BASELINE && other.place() == case.place());
        at_place().find(|other| other.variant == case.variant).or_else(|| at_place().next())
    }

    /// On how many threads both engines computed, and how llama.cpp's were chosen; ends with a space unless it is empty.
    pub fn threads(&self) -> String {
        let runs = |engine: &'static str| {
            let of_engine = self.cases.iter().filter(move |case| case.engine == engine);
            of_engine.flat_map(|case| &case.runs).map(|run| &run.record).filter(|record| record.n_threads > 0)
        };
        let distinct = |engine: &'static str| {
            let mut numbers: Vec<i32> = runs(engine).map(|record| record.n_threads).collect();
            numbers.sort_unstable();
            numbers.dedup();
            numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
        };
        let (own, stock) = (distinct(HOBBIT), distinct(BASELINE));
        let mut words: Vec<String> = Vec::new();
        if !own.is_empty() {
            words.push(format!("hobbit on {own} threads"));
        }
        if !stock.is_empty() {
            let tried = runs(BASELINE).all(|record| !record.more.hobbit_threads_tried.is_empty());
            let how = if tried { ", in each case as many as it was fastest with in a short run of it" } else { "" };
            words.push(format!("llama.cpp on {stock}{how}"));
        }
        if words.is_empty() { String::new() } else { format!("Threads: {}. ", words.join("; ")) }
    }

    /// Names of the files behind it, each once.
    pub fn files(&self) -> Vec<String> {
        let mut files: Vec<String> =
            self.cases.iter().flat_map(|case| case.runs.iter().map(|run| run.file.clone())).collect();
        files.sort();
        files.dedup();
        files
    }
}

/// Prompts and single tokens that were measured apart, and belong to one row: where a study has one length of each.
struct Alone {
    lengths: Option<(u32, u32)>,
}

impl Alone {
    fn of(entries: &[&Entry]) -> Self {
        let lengths = |own: fn(&Record) -> (u32, u32)| {
            let mut lengths: Vec<u32> = entries
                .iter()
                .map(|entry| own(&entry.record))
                .filter(|(length, other)| *length > 0 && *other == 0)
                .map(|(length, _)| length)
                .collect();
            lengths.sort_unstable();
            lengths.dedup();
            lengths
        };
        let prompts = lengths(|record| (record.n_prompt, record.n_gen));
        let single = lengths(|record| (record.n_gen, record.n_prompt));
        match (&prompts[..], &single[..]) {
            (&[n_prompt], &[n_gen]) => Self { lengths: Some((n_prompt, n_gen)) },
            _ => Self { lengths: None },
        }
    }

    fn test(&self, record: &Record) -> Test {
        let (n_prompt, n_gen) = match self.lengths {
            Some(lengths) if (record.n_prompt > 0) != (record.n_gen > 0) => lengths,
            _ => (record.n_prompt, record.n_gen),
        };
        Test { n_prompt, n_gen, n_depth: record.n_depth }
    }
}
