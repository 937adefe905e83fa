//! Records that belong together: cases of a study, with their repeated runs.

use std::collections::BTreeSet;

use super::figures::{self, is_ok};
use super::number;
use super::read::Entry;
use hobbit_programs::bench::case::Test;
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

/// What two engines must share to be compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    /// Name of the model, as tables show it.
    pub model: String,
    /// Bytes of the control group.
    pub limit: Option<u64>,
    /// Bytes per second that might be read.
    pub disk: Option<u64>,
    /// Other processes that computed meanwhile.
    pub busy: u32,
    /// What was evaluated.
    pub test: Test,
}

impl Place {
    /// The model and its memory, in words.
    pub fn room(&self) -> String {
        match self.limit {
            Some(limit) => format!("{} in {}", self.model, number::bytes(limit as f64)),
            None => format!("{} without a limit", self.model),
        }
    }

    /// That and what was evaluated.
    pub fn words(&self) -> String {
        format!("{}, {}", self.room(), self.test.name())
    }
}

/// One thing measured, once or several times.
#[derive(Clone, Debug)]
pub struct Case<'a> {
    /// Where it was measured and what.
    pub place: Place,
    /// Who was measured.
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

    /// Of a study of variants, what tells cases apart in a word.
    pub fn variant_name(&self) -> &str {
        match self.variant {
            _ if self.engine != HOBBIT => self.engine,
            "" => HOBBIT,
            variant => variant,
        }
    }

    /// The first run's that has the figure, however it ended.
    pub fn any(&self, figure: impl Fn(&Record) -> Option<f64>) -> Option<f64> {
        self.runs.iter().find_map(|run| figure(&run.record))
    }

    /// Bytes of the limit.
    pub fn room_bytes(&self) -> f64 {
        self.place.limit.map_or(f64::INFINITY, |bytes| bytes as f64)
    }

    /// What tells contestants apart.
    pub fn who(&self) -> (&str, &str, &str) {
        (self.engine, self.variant, self.flags)
    }
}

/// What has the same key together, in the order of the first ones.
pub fn grouped<T, K: PartialEq>(all: impl IntoIterator<Item = T>, key: impl Fn(&T) -> K) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for one in all {
        let key = key(&one);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, group)) => group.push(one),
            None => groups.push((key, vec![one])),
        }
    }
    groups
}

/// Each value once, in their order.
pub fn distinct<T: PartialEq + Clone>(values: impl IntoIterator<Item = T>) -> Vec<T> {
    grouped(values, T::clone).into_iter().map(|(value, _)| value).collect()
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
        let of_study = || entries.iter().filter(|entry| labels.contains(&entry.record.hobbit_label.as_str()));
        let apart = apart(of_study().map(|entry| &entry.record));
        let key = |entry: &&'a Entry| {
            let record = &entry.record;
            let (n_prompt, n_gen) = match apart {
                Some(lengths) if (record.n_prompt > 0) != (record.n_gen > 0) => lengths,
                _ => (record.n_prompt, record.n_gen),
            };
            let place = Place {
                model: figures::model(record, entries),
                limit: record.hobbit_limit,
                disk: record.hobbit_disk_limit,
                busy: record.hobbit_busy.unwrap_or(0),
                test: Test { n_prompt, n_gen, n_depth: record.n_depth },
            };
            (place, record.hobbit_engine.as_str(), record.hobbit_variant.as_str(), record.hobbit_flags.as_str())
        };
        let groups = grouped(of_study(), key).into_iter();
        let case = |((place, engine, variant, flags), runs)| Case { place, engine, variant, flags, runs };
        Self { cases: groups.map(case).collect() }
    }

    /// The cases of each place, whoever else computed there.
    pub fn by_place(&self) -> Vec<(Place, Vec<&Case<'a>>)> {
        grouped(&self.cases, |case| Place { busy: 0, ..case.place.clone() })
    }

    /// hobbit's cases.
    pub fn hobbit(&self) -> impl Iterator<Item = &Case<'a>> {
        self.cases.iter().filter(|case| case.engine == HOBBIT)
    }

    /// hobbit's cases of one model, variant and test together, by `key` among each other.
    pub fn hobbit_by(&self, key: impl Fn(&Case<'a>) -> f64) -> Vec<Vec<&Case<'a>>> {
        let mut groups = grouped(self.hobbit(), |case| (&case.place.model, case.variant, case.place.test));
        groups.iter_mut().for_each(|(_, cases)| cases.sort_by(|a, b| key(a).total_cmp(&key(b))));
        groups.into_iter().map(|(_, cases)| cases).collect()
    }

    /// The case of plain llama.cpp that `case` is measured against: that of the same variant if there are several.
    pub fn baseline(&self, case: &Case) -> Option<&Case<'a>> {
        let at_place = || self.cases.iter().filter(|other| other.engine == BASELINE && other.place == case.place);
        at_place().find(|other| other.variant == case.variant).or_else(|| at_place().next())
    }

    /// On how many threads both engines computed, and how llama.cpp's were chosen; ends with a space unless it is empty.
    pub fn threads(&self) -> String {
        let runs = |engine: &'static str| {
            let of_engine = self.cases.iter().filter(move |case| case.engine == engine);
            of_engine.flat_map(|case| &case.runs).map(|run| &run.record).filter(|record| record.n_threads > 0)
        };
        let distinct = |engine: &'static str| {
            let numbers: BTreeSet<i32> = runs(engine).map(|record| record.n_threads).collect();
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
        let files: BTreeSet<_> = self.cases.iter().flat_map(|case| &case.runs).map(|run| run.file.clone()).collect();
        files.into_iter().collect()
    }
}

/// Prompts and single tokens that were measured apart, and belong to one row: where a study has one length of each.
fn apart<'a>(records: impl Iterator<Item = &'a Record> + Clone) -> Option<(u32, u32)> {
    let only = |own: fn(&Record) -> (u32, u32)| {
        let lengths = records.clone().map(own).filter(|(length, other)| *length > 0 && *other == 0);
        match distinct(lengths)[..] {
            [(length, _)] => Some(length),
            _ => None,
        }
    };
    only(|record| (record.n_prompt, record.n_gen)).zip(only(|record| (record.n_gen, record.n_prompt)))
}
