//! Counts by gungraun: one JSON object a line (`--output-format=json`).

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use serde_json::Value;

/// Instructions by name of the bench: `group::function id`.
pub type Counts = BTreeMap<String, u64>;

/// The counts of a run.
///
/// # Errors
/// Names the line that is not what gungraun 0.20 writes; nothing counted, or something twice, is an error too.
pub fn parse(output: &str) -> anyhow::Result<Counts> {
    let mut counts = Counts::new();
    for (line, number) in output.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
        let bench: Value =
            serde_json::from_str(line).with_context(|| format!("line {number} of gungraun's output is no JSON"))?;
        let (name, instructions) = one(&bench).with_context(|| {
            format!("line {number} of gungraun's output: expected a bench of callgrind's with a count of Ir")
        })?;
        ensure!(counts.insert(name.clone(), instructions).is_none(), "{name} was counted twice");
    }
    ensure!(!counts.is_empty(), "gungraun counted nothing");
    Ok(counts)
}

fn one(bench: &Value) -> Option<(String, u64)> {
    let word = |key: &str| bench.get(key)?.as_str();
    let counted = bench.pointer("/profiles/0/data/total/metrics/Ir/values/new")?.as_u64()?;
    let id = word("id").map_or_else(String::new, |id| format!(" {id}"));
    Some((format!("{}::{}{id}", word("group")?, word("function_name")?), counted))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: &str, metrics: &str) -> String {
        format!(
            r#"{{"function_name":"decide","group":"eviction","id":"{id}","profiles":[{{"data":{{"total":{{"metrics":{metrics}}}}}}}]}}"#
        )
    }

    #[test]
    fn a_line_is_a_bench() {
        let old_too = r#"{"Ir":{"diffs":{"diff_pct":"0"},"values":{"new":40151,"old":7}}}"#;
        let output = format!("{}\n\n{}\n", line("lru", old_too), line("lfu", r#"{"Ir":{"values":{"new":5}}}"#));
        let expected = [("eviction::decide lfu", 5), ("eviction::decide lru", 40151)];
        assert_eq!(parse(&output).unwrap(), expected.map(|(name, n)| (name.to_owned(), n)).into());
    }

    #[test]
    fn what_is_no_count_is_refused() {
        let error = |output: &str| format!("{:#}", parse(output).unwrap_err());
        assert_eq!(error("\n"), "gungraun counted nothing");
        assert!(error("Gungraun result: Ok").starts_with("line 1 of gungraun's output is no JSON"));
        assert!(
            error(&line("lru", r#"{"Dr":{"values":{"new":5}}}"#)).starts_with("line 1 of gungraun's output: expected")
        );
        let twice = line("lru", r#"{"Ir":{"values":{"new":5}}}"#);
        assert_eq!(error(&format!("{twice}\n{twice}")), "eviction::decide lru was counted twice");
    }
}
