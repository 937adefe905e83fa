//! Checks names that users and servers give: none leads out of the cache.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Limit of a name's length, in bytes.
const LONGEST: usize = 1024;

/// A repository of the Hub: `user/name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoId(String);

impl RepoId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for RepoId {
    type Err = String;

    /// Letters, digits and `_`, with single `/`, `.` and `-` between them, one `/` in all: llama.cpp's rule, which the Hub's keep.
    fn from_str(text: &str) -> Result<Self, String> {
        let is_plain = |part: &str| {
            let is_word = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            part.split(['.', '-']).all(is_word)
        };
        let is_repo =
            text.len() <= 256 && text.split_once('/').is_some_and(|(user, name)| is_plain(user) && is_plain(name));
        // `--` separates names in the cache, and `..` leads out of it.
        is_repo
            .then(|| Self(text.to_owned()))
            .ok_or_else(|| format!("'{text}' is no repository, expected USER/REPO[:QUANT]"))
    }
}

/// The relative path of a file in a repository; `None` if it leads out of it.
pub fn path_within(name: &str) -> Option<PathBuf> {
    let is_plain = |part: &str| !matches!(part, "" | "." | "..") && part.len() <= 255;
    let is_safe = name.len() <= LONGEST
        && !name.contains(|c: char| c == '\\' || c == ':' || c.is_control())
        && name.split('/').all(is_plain);
    is_safe.then(|| name.split('/').collect())
}

/// Whether this is the hash of a commit.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && is_hex(text)
}

/// Whether this is a SHA-256 in hexadecimal digits, the name of an LFS file's blob.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && is_hex(text)
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// A server's etag as a file name: without quotes and the mark of weak etags. `None` if it cannot be one.
pub fn blob_name(etag: &str) -> Option<String> {
    let bare = etag.trim().trim_start_matches("W/").trim_matches('"');
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    (!bare.is_empty() && bare.len() <= 128 && bare.bytes().all(is_plain)).then(|| bare.to_ascii_lowercase())
}

/// The file name at the end of a URL's path, if it has a safe one.
pub fn file_of_url(url: &str) -> Option<&str> {
    let path = url.split(['?', '#']).next()?;
    let (_, after) = path.split_once("://")?;
    let (directory, name) = after.rsplit_once('/')?;
    (!directory.is_empty() && path_within(name).is_some()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories() {
        for good in ["a/b", "ggml-org/gpt-oss-20b-GGUF", "TheBloke/Mixtral-8x7B-v0.1-GGUF", "a_b/c.d_e-f"] {
            assert_eq!(good.parse::<RepoId>().unwrap().as_str(), good);
        }
        let long = format!("a/{}", "b".repeat(300));
        for bad in
            ["", "a", "a/", "/b", "a/b/c", "../b", "a/..", "a/b--c", "a/b..c", "a/.b", "a/b-", "a b/c", "a/b\0", &long]
        {
            assert!(bad.parse::<RepoId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn no_path_leads_out() {
        assert_eq!(path_within("a.gguf"), Some("a.gguf".into()));
        assert_eq!(path_within("Q4_K_M/a-00001-of-00002.gguf"), Some("Q4_K_M/a-00001-of-00002.gguf".into()));
        let long = "a".repeat(256);
        for bad in
            ["", "/etc/passwd", "../a", "a/../b", "a/..", "a//b", "./a", "a/", "a\\b", "C:a", "a\0b", "a\nb", &long]
        {
            assert_eq!(path_within(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn etags_become_names() {
        let sha = "a".repeat(64);
        assert_eq!(blob_name(&format!("\"{sha}\"")), Some(sha.clone()));
        assert_eq!(blob_name("W/\"Ab-1\""), Some("ab-1".into()));
        for bad in ["", "\"\"", "\"../x\"", "\"a/b\"", "a b", "a.b"] {
            assert_eq!(blob_name(bad), None, "{bad}");
        }
        assert!(is_sha256(&sha) && !is_sha256("a") && is_commit(&sha[..40]) && !is_commit(&sha));
    }

    #[test]
    fn files_of_urls() {
        assert_eq!(file_of_url("https://h/a/b.gguf"), Some("b.gguf"));
        assert_eq!(file_of_url("http://h:1/b.gguf?download=true#x"), Some("b.gguf"));
        for bad in ["https://h/a/", "https://h", "b.gguf", "https:///b.gguf", "https://h/a/.."] {
            assert_eq!(file_of_url(bad), None, "{bad}");
        }
    }
}
