//! From files to records.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use hobbit::files::capped;
use hobbit_programs::bench::record::Record;

/// Longest file of records, in bytes: a hundred thousand of them.
const RECORDS_BYTES_MAX: u64 = 256 << 20;

/// A record and where it stood.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// What was measured.
    pub record: Record,
    /// Name of its file, without directories.
    pub file: String,
}

/// Names of the files of some records, each once.
pub fn files(entries: &[Entry]) -> Vec<String> {
    let files: BTreeSet<_> = entries.iter().map(|entry| entry.file.clone()).collect();
    files.into_iter().collect()
}

/// The records of `files`, in their order; of a directory, those of its `.json` and `.jsonl` files by name. Named files without
/// records are passed over with a note.
///
/// # Errors
/// What was named cannot be read, holds a record of another shape, or no record at all.
pub fn read(files: &[PathBuf]) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for path in files {
        let unreadable = || format!("{}: cannot be read", path.display());
        if path.is_dir() {
            let within = std::fs::read_dir(path).with_context(unreadable)?;
            let within =
                within.map(|file| Ok(file?.path())).collect::<io::Result<BTreeSet<_>>>().with_context(unreadable)?;
            let has_extension =
                |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "json" || extension == "jsonl");
            for path in within.iter().filter(has_extension).filter(|path| path.is_file()) {
                entries.extend(of_file(path)?.unwrap_or_default());
            }
            continue;
        }
        match of_file(path)? {
            Some(more) => entries.extend(more),
            None => note(path, "holds no records of hobbit-bench; passed over"),
        }
    }
    if entries.is_empty() {
        let files: Vec<_> = files.iter().map(|path| path.display().to_string()).collect();
        bail!("no records in {}; expected what hobbit-bench writes with -o json or -o jsonl", files.join(", "));
    }
    Ok(entries)
}

fn note(path: &Path, what: &str) {
    let _ = writeln!(io::stderr(), "note: {}: {what}", path.display());
}

/// The records of a file; `None` if it holds something else.
fn of_file(path: &Path) -> Result<Option<Vec<Entry>>> {
    let name = path.display();
    let bytes = capped::read(path, RECORDS_BYTES_MAX).with_context(|| format!("{name}: cannot be read"))?;
    let Ok(text) = String::from_utf8(bytes) else { return Ok(None) };
    let Some(values) = objects(&text, path) else { return Ok(None) };
    let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let entry = |(number, value): (usize, Value)| match serde_json::from_value(without_nulls(value)) {
        Ok(record) => Ok(Entry { record, file: file.clone() }),
        Err(reason) => bail!(
            "{name}: record {number} is none of hobbit-bench's ({reason}); written by another version? Measure again, or leave the \
             file out"
        ),
    };
    (1..).zip(values).map(entry).collect::<Result<_>>().map(Some)
}

/// What looks like records: an array of them, or one a line. A last line that a crash cut off is left out.
fn objects(text: &str, path: &Path) -> Option<Vec<Value>> {
    let values = match serde_json::from_str(text) {
        Ok(Value::Array(values)) => values,
        Ok(value) => vec![value],
        Err(_) => {
            let mut values = Vec::new();
            let mut lines = text.split_inclusive('\n').filter(|line| !line.trim().is_empty()).peekable();
            while let Some(line) = lines.next() {
                match serde_json::from_str(line) {
                    Ok(value) => values.push(value),
                    Err(_) if lines.peek().is_none() && !line.ends_with('\n') && !values.is_empty() => {
                        note(path, "the last record is cut off; what precedes it is used");
                    }
                    Err(_) => return None,
                }
            }
            values
        }
    };
    (!values.is_empty() && values.iter().all(|value| value["hobbit_engine"].is_string())).then_some(values)
}

/// Whatever is null takes its default: JSON has no other word for what is not a number.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let known = map.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(known.map(|(key, value)| (key, without_nulls(value))).collect())
        }
        Value::Array(values) => {
            Value::Array(values.into_iter().filter(|value| !value.is_null()).map(without_nulls).collect())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, name: &str, text: &str) -> PathBuf {
        let path = directory.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn arrays_lines_and_directories_are_read_and_others_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let array = write(
            at,
            "b.json",
            r#"[{"hobbit_engine":"x","avg_ts":null,"samples_ts":[1.5,null]},{"hobbit_engine":"y"}]"#,
        );
        let lines = write(
            at,
            "a.jsonl",
            "{\"hobbit_engine\":\"z\",\"hobbit_series\":[{\"t_ns\":1,\"heap\":null}]}\n\n{\"hobbit_eng",
        );
        let other = write(at, "c.json", r#"{"policies": []}"#);
        let text = write(at, "d.md", "words");
        let engines = |files: &[PathBuf]| -> Vec<String> {
            read(files).unwrap().iter().map(|entry| format!("{}:{}", entry.file, entry.record.hobbit_engine)).collect()
        };
        assert_eq!(engines(&[at.to_owned()]), ["a.jsonl:z", "b.json:x", "b.json:y"]);
        assert_eq!(engines(&[other.clone(), text, array.clone(), lines]), ["b.json:x", "b.json:y", "a.jsonl:z"]);
        assert_eq!(read(&[array]).unwrap()[0].record.more.samples_ts, [1.5]);
        assert!(read(&[other]).unwrap_err().to_string().contains("no records in"));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let wrong = write(
            directory.path(),
            "w.jsonl",
            "{\"hobbit_engine\":\"a\"}\n{\"hobbit_engine\":\"a\",\"n_gen\":\"many\"}\n",
        );
        let error = read(&[wrong]).unwrap_err().to_string();
        assert!(error.contains("w.jsonl") && error.contains("record 2") && error.contains("many"), "{error}");
        let error = read(&[directory.path().join("none.json")]).unwrap_err().to_string();
        assert!(error.contains("none.json: cannot be read"), "{error}");
        for text in ["", "[]", "[1]", "{\"hobbit_engine\":", "null"] {
            let file = write(directory.path(), "e.json", text);
            assert!(read(&[file]).unwrap_err().to_string().starts_with("no records in"), "{text:?}");
        }
        std::fs::write(directory.path().join("binary.json"), [0xff, 0xfe, 0]).unwrap();
        let error = read(&[directory.path().join("binary.json")]).unwrap_err().to_string();
        assert!(error.starts_with("no records in"), "{error}");
    }
}
