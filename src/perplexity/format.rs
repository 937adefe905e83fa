//! The lines of `llama-perplexity`, and one of hobbit's own.

use std::fmt::Write as _;

use hobbit::stats::Stats;
use hobbit_core::perplexity::divergence::{Distribution, Divergence, Means};
use hobbit_core::perplexity::estimate::{Estimate, Sums};
use hobbit_core::units::Percent;

/// `12.34`, with six significant digits and no zeros at the end, as C's `%g` prints milliseconds.
pub fn significant(number: f64) -> String {
    let before = if number >= 1.0 { number.log10().floor() as i32 + 1 } else { 1 };
    let decimals = usize::try_from(6 - before).unwrap_or(0).min(3);
    let text = format!("{number:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Estimated duration: `1 hours 2.50 minutes`.
pub fn eta(seconds: f64) -> String {
    let mut seconds = seconds as u64;
    let mut line = String::new();
    if seconds >= 3600 {
        let _ = write!(line, "{} hours ", seconds / 3600);
        seconds %= 3600;
    }
    let _ = writeln!(line, "{:.2} minutes", seconds as f64 / 60.0);
    line
}

/// After a chunk: `[3]4.1234,`.
pub fn chunk(number: usize, ppl: f64) -> String {
    format!("[{number}]{ppl:.4},")
}

/// After a chunk that begins at token `start`, as a line: perplexity, mean negative log-likelihood, its standard error.
pub fn chunk_line(start: usize, nll: &Sums) -> String {
    let mean = nll.mean();
    let error = nll.uncertainty().unwrap_or(0.0);
    format!("{start:8}  {:.4}  {mean:4.6}  {error:4.6}\n", mean.exp())
}

/// The final estimate, the line usually quoted; `None` if the spread is undefined.
pub fn final_estimate(nll: &Sums) -> Option<String> {
    let ppl = nll.mean().exp();
    nll.uncertainty().map(|error| format!("Final estimate: PPL = {ppl:.4} +/- {:.5}", error * ppl))
}

/// Heads the lines of [`divergence_line`].
pub const DIVERGENCE_HEAD: &str = concat!(
    "\nchunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence",
    "              Δp RMS            Same top p\n"
);

/// `0.5000 ± 0.0100`, in columns.
fn plus_minus(Estimate { value, uncertainty }: Estimate, width: usize, decimals: usize) -> String {
    format!("{value:width$.decimals$} ± {uncertainty:width$.decimals$}")
}

/// Means up to a chunk.
pub fn divergence_line(number: usize, means: &Means) -> String {
    let percent = |share: Estimate| plus_minus(share.scaled(100.0), 6, 3);
    format!(
        "{number:4}    {}    {}    {}    {} %    {} %\n",
        plus_minus(means.ppl, 9, 4),
        plus_minus(means.ln_ppl_ratio, 10, 5),
        plus_minus(means.kld, 10, 5),
        percent(means.p_diff_rms),
        percent(means.same_top),
    )
}

/// The final table.
pub fn divergence_table(all: &Divergence) -> String {
    let means = all.means();
    let six = |name: &str, estimate: Estimate| format!("{name:<30}: {}\n", plus_minus(estimate, 10, 6));
    let mut table = "====== Perplexity statistics ======\n".to_owned();
    table += &six("Mean PPL(Q)", means.ppl);
    table += &six("Mean PPL(base)", means.ppl_base);
    let _ = writeln!(table, "Cor(ln(PPL(Q)), ln(PPL(base))): {:6.2}%", 100.0 * means.ln_ppl_correlation);
    table += &six("Mean ln(PPL(Q)/PPL(base))", means.ln_ppl_ratio);
    table += &six("Mean PPL(Q)/PPL(base)", means.ppl_ratio);
    table += &six("Mean PPL(Q)-PPL(base)", means.ppl_difference);
    table += "\n====== KL divergence statistics ======\n";
    let _ = writeln!(table, "Mean    KLD: {}", plus_minus(means.kld, 10, 6));
    distribution(&mut table, "KLD", &all.klds(), |value| format!("{value:10.6}"));
    table += "\n====== Token probability statistics ======\n";
    let percent =
        |Estimate { value, uncertainty }: Estimate| format!("{:6.3} ± {:5.3} %", 100.0 * value, 100.0 * uncertainty);
    let _ = writeln!(table, "Mean    Δp: {}", percent(means.p_diff));
    distribution(&mut table, "Δp", &all.p_diffs(), |value| format!("{:6.3}%", 100.0 * f64::from(value)));
    let _ = writeln!(table, "RMS Δp    : {}", percent(means.p_diff_rms));
    let _ = writeln!(table, "Same top p: {}", percent(means.same_top));
    table
}

fn distribution(table: &mut String, of: &str, spread: &Distribution, number: impl Fn(f32) -> String) {
    let _ = writeln!(table, "Maximum {of}: {}", number(spread.maximum));
    let middle = spread.percentiles.iter().position(|&(share, _)| share < 0.5).unwrap_or(spread.percentiles.len());
    for (i, &(share, value)) in spread.percentiles.iter().enumerate() {
        if i == middle {
            let _ = writeln!(table, "Median  {of}: {}", number(spread.median));
        }
        let _ = writeln!(table, "{:4.1}%   {of}: {}", share * 100.0, number(value));
    }
    let _ = writeln!(table, "Minimum {of}: {}", number(spread.minimum));
}

/// hobbit's own last line: the sources of the experts that a run used.
pub fn experts_used(stats: &Stats) -> Option<String> {
    let total = stats.total();
    let rate = Percent(total.hit_rate()?);
    let used = total.used.shares().map_or_else(String::new, |shares| format!("; used {shares}"));
    Some(format!("hobbit: experts: hit rate {rate} ({} hits, {} misses){used}", total.hits, total.misses))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit_core::perplexity::divergence::Comparison;

    #[test]
    fn numbers_as_c_prints_them() {
        for (number, text) in [(27.792, "27.792"), (27.5, "27.5"), (0.25, "0.25"), (0.0, "0"), (123456.789, "123457")] {
            assert_eq!(significant(number), text);
        }
        assert_eq!(significant(1234.567), "1234.57");
        assert_eq!((eta(8.1), eta(3725.9)), ("0.13 minutes\n".into(), "1 hours 2.08 minutes\n".into()));
    }

    #[test]
    fn perplexities() {
        let mut nll = Sums::default();
        [1.0, 2.0, 3.0, 2.0].into_iter().for_each(|value| nll.add(value));
        assert_eq!(chunk(3, nll.mean().exp()), "[3]7.3891,");
        assert_eq!(chunk_line(512, &nll), "     512  7.3891  2.000000  0.408248\n");
        assert_eq!(final_estimate(&nll).unwrap(), "Final estimate: PPL = 7.3891 +/- 3.01657");
        assert_eq!(final_estimate(&Sums::default()), None);
    }

    fn divergence() -> Divergence {
        let mut all = Divergence::default();
        for i in 0..101 {
            let nll = 1.0 + (i % 10) as f32 / 10.0;
            let p_diff = (i % 3) as f32 / 10.0 - 0.1;
            all.add(&Comparison { nll: nll + 0.1, nll_base: nll, kld: f64::from(i) / 100.0, p_diff, same_top: i < 50 });
        }
        all
    }

    #[test]
    fn a_chunk_of_a_comparison() {
        let of = |value| Estimate { value, uncertainty: value / 8.0 };
        let means = Means {
            ppl: of(20.0),
            ln_ppl_ratio: of(-0.125),
            kld: of(0.5),
            p_diff_rms: of(0.08),
            same_top: of(0.5),
            ..divergence().means()
        };
        let expected = "   7      20.0000 ±    2.5000      -0.12500 ±   -0.01562       0.50000 ±    0.06250     \
                        8.000 ±  1.000 %    50.000 ±  6.250 %\n";
        assert_eq!(divergence_line(7, &means), expected);
        assert!(DIVERGENCE_HEAD.ends_with("KL Divergence              Δp RMS            Same top p\n"));
    }

    #[test]
    fn the_table_has_llama_cpps_rows() {
        let table = divergence_table(&divergence());
        let names: Vec<&str> = table.lines().map(|line| line.rsplit_once(':').map_or(line, |(name, _)| name)).collect();
        let expected = "====== Perplexity statistics ======|Mean PPL(Q)                   |\
            Mean PPL(base)                |\
            Cor(ln(PPL(Q)), ln(PPL(base)))|Mean ln(PPL(Q)/PPL(base))     |Mean PPL(Q)/PPL(base)         |\
            Mean PPL(Q)-PPL(base)         ||====== KL divergence statistics ======|Mean    KLD|Maximum KLD|99.9%   KLD|\
            99.0%   KLD|95.0%   KLD|90.0%   KLD|Median  KLD|10.0%   KLD| 5.0%   KLD| 1.0%   KLD| 0.1%   KLD|\
            Minimum KLD||\
            ====== Token probability statistics ======|Mean    Δp|Maximum Δp|99.9%   Δp|99.0%   Δp|95.0%   Δp|\
            90.0%   Δp|\
            75.0%   Δp|Median  Δp|25.0%   Δp|10.0%   Δp| 5.0%   Δp| 1.0%   Δp| 0.1%   Δp|\
            Minimum Δp|RMS Δp    |Same top p";
        assert_eq!(names, expected.split('|').collect::<Vec<_>>());
        for line in [
            "Median  KLD:   0.500000",
            "Maximum KLD:   1.000000",
            "Maximum Δp: 10.000%",
            "Minimum Δp: -10.000%",
            "Cor(ln(PPL(Q)), ln(PPL(base))): 100.00%",
        ] {
            assert!(table.lines().any(|found| found == line), "{line} in\n{table}");
        }
    }
}
