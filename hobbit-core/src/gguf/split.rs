//! Split models: names of shards as llama.cpp's `llama_split_path` makes them, `<prefix>-00001-of-00003.gguf`.

use std::path::{Path, PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardName {
    prefix: String,
    /// From 1.
    pub(super) number: u32,
    pub(super) count: u32,
}

impl ShardName {
    /// `None` if the name is not a shard's.
    pub(super) fn parse(path: &Path) -> Option<Self> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let five = |digits: &str| -> Option<u32> {
            let sound = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
            if sound { digits.parse().ok() } else { None }
        };
        let (number, count) = (five(number)?, five(count)?);
        let sound = !prefix.is_empty() && (1..=count).contains(&number);
        sound.then(|| Self { prefix: prefix.to_owned(), number, count })
    }

    /// Path of shard `number` (from 1), beside `sibling`.
    pub(super) fn path(&self, number: u32, sibling: &Path) -> PathBuf {
        sibling.with_file_name(format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count))
    }
}

/// The files of the model at `path`, to judge by its name alone: of a shard, all of them. They need not be there.
pub fn shards_by_name(path: &Path) -> Vec<PathBuf> {
    match ShardName::parse(path) {
        Some(name) => (1..=name.count).map(|number| name.path(number, path)).collect(),
        None => vec![path.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_print() {
        let path = Path::new("/m/big-model-00002-of-00003.gguf");
        let name = ShardName::parse(path).unwrap();
        assert_eq!((name.prefix.as_str(), name.number, name.count), ("big-model", 2, 3));
        assert_eq!(name.path(1, path), Path::new("/m/big-model-00001-of-00003.gguf"));
        for bad in [
            "model.gguf",
            "model-0002-of-00003.gguf",
            "model-00004-of-00003.gguf",
            "model-00000-of-00003.gguf",
            "model-00001-of-00003.bin",
            "-00001-of-00003.gguf",
            "model-+0001-of-00003.gguf",
            "model-00001-of-99999999999.gguf",
            "",
        ] {
            assert_eq!(ShardName::parse(Path::new(bad)), None, "{bad}");
        }
        assert_eq!(shards_by_name(path)[2], Path::new("/m/big-model-00003-of-00003.gguf"));
        assert_eq!(shards_by_name(Path::new("/m/model.gguf")), [Path::new("/m/model.gguf")]);
    }
}
