//! Names of repositories and files, from users and servers: none leads out of the cache. A file of a repository is
//! chosen by llama.cpp's rules (`common/download.cpp`).

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

    /// Letters, digits and `_`, with single `/`, `.` and `-` between them, one `/` in all: llama.cpp's rule, which the
    /// Hub's keep.
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

/// Quants to try, in order, if none is named.
const USUAL: [&str; 2] = ["Q4_K_M", "Q8_0"];
/// Words in names of files that accompany models.
const COMPANIONS: [&str; 6] = ["mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-"];
/// Limit of parts of a split model.
const MOST_PARTS: u32 = 1000;

/// The wanted file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Want {
    /// The usual quant.
    Usual,
    /// A quant: part of a file's name.
    Quant(String),
    /// This file.
    File(String),
}

/// No file was chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    #[error("it has no GGUF file of a model{}", listed("; there is", .others))]
    NoModel {
        /// Files that the repository has.
        others: Vec<String>,
    },
    #[error("it has no file of the quant '{quant}'{}", listed("; there are", .quants))]
    NoQuant { quant: String, quants: Vec<String> },
    #[error("it has no file '{file}'{}", listed("; its GGUF files are", .files))]
    NoFile { file: String, files: Vec<String> },
    #[error("'{file}' is a part of {count}, and '{missing}' is not there")]
    NoPart { file: String, count: u32, missing: String },
}

fn listed(before: &str, names: &[String]) -> String {
    const SHOWN: usize = 40;
    let more = if names.len() > SHOWN { format!(" and {} more", names.len() - SHOWN) } else { String::new() };
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.is_empty() { String::new() } else { format!("{before} {shown}{more}") }
}

/// The wanted files among `names`: all parts of a split model, in order. Names that lead out of the cache are ignored.
pub fn choose(names: &[String], want: &Want) -> Result<Vec<String>, ChoiceError> {
    let mut names: Vec<&str> = names.iter().map(String::as_str).filter(|name| path_within(name).is_some()).collect();
    names.sort_unstable();
    let models: Vec<&str> = names.iter().copied().filter(|name| is_model(name)).collect();
    let chosen = match want {
        Want::File(file) => names.iter().copied().find(|name| name == file).ok_or_else(|| ChoiceError::NoFile {
            file: file.clone(),
            files: owned(names.iter().copied().filter(|name| is_gguf(name))),
        })?,
        _ if models.is_empty() => return Err(ChoiceError::NoModel { others: owned(names.iter().copied()) }),
        Want::Quant(quant) => of_quant(&models, quant)
            .ok_or_else(|| ChoiceError::NoQuant { quant: quant.clone(), quants: quants(&models) })?,
        Want::Usual => USUAL
            .iter()
            .find_map(|quant| of_quant(&models, quant))
            .or_else(|| models.iter().copied().find(|name| is_first(name)))
            .ok_or_else(|| ChoiceError::NoModel { others: owned(names.iter().copied()) })?,
    };
    let parts = parts_of(chosen);
    match parts.iter().find(|part| !names.contains(&part.as_str())) {
        Some(missing) => {
            Err(ChoiceError::NoPart { file: chosen.to_owned(), count: parts.len() as u32, missing: missing.clone() })
        }
        None => Ok(parts),
    }
}

/// All parts, in order, of the split model to which `name` belongs; `name` alone if it is no part.
pub fn parts_of(name: &str) -> Vec<String> {
    match split(name) {
        Some((stem, _, count)) => (1..=count).map(|part| format!("{stem}-{part:05}-of-{count:05}.gguf")).collect(),
        None => vec![name.to_owned()],
    }
}

fn owned<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    names.map(str::to_owned).collect()
}

fn is_gguf(name: &str) -> bool {
    name.ends_with(".gguf")
}

fn is_model(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    is_gguf(name) && !COMPANIONS.iter().any(|companion| file.contains(companion))
}

/// Stem, number and count of a part of a split model: `stem-00001-of-00003.gguf`.
fn split(name: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let number_of = |digits: &str| {
        let is_number = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        is_number.then(|| digits.parse::<u32>().ok()).flatten()
    };
    let (number, count) = (number_of(number)?, number_of(count)?);
    (!stem.is_empty() && (1..=count).contains(&number) && count <= MOST_PARTS).then_some((stem, number, count))
}

/// Whether this is the file of a model, or the first of several.
pub fn is_first_part_of_model(name: &str) -> bool {
    is_model(name) && is_first(name)
}

fn is_first(name: &str) -> bool {
    split(name).is_none_or(|(_, number, _)| number == 1)
}

/// The first model whose name has `quant` before a `.` or `-`. A whole word wins: `Q4_XS` is not `IQ4_XS`.
fn of_quant<'a>(models: &[&'a str], quant: &str) -> Option<&'a str> {
    let quant = quant.to_ascii_uppercase();
    let found = |is_word: bool| {
        models.iter().copied().find(|name| {
            let upper = name.to_ascii_uppercase();
            let fits = |(at, _): (usize, &str)| {
                let before = upper[..at].chars().next_back();
                upper[at + quant.len()..].starts_with(['.', '-'])
                    && !(is_word && before.is_some_and(|c| c.is_alphanumeric()))
            };
            is_first(name) && upper.match_indices(&quant).any(fits)
        })
    };
    found(true).or_else(|| found(false))
}

/// The quant that the name of a model ends with.
pub fn quant_of(name: &str) -> Option<String> {
    let stem = split(name).map_or_else(|| name.trim_end_matches(".gguf"), |(stem, ..)| stem);
    let word = stem.rsplit(['-', '.', '/']).next()?;
    let is_quant = word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && word != stem;
    is_quant.then(|| word.to_ascii_uppercase())
}

/// The quants that names of models end with, each once.
fn quants(models: &[&str]) -> Vec<String> {
    let mut quants: Vec<String> = models.iter().filter_map(|name| quant_of(name)).collect();
    quants.sort_unstable();
    quants.dedup();
    quants
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

    fn chosen(names: &str, want: &Want) -> Result<String, String> {
        let names: Vec<String> = names.split_whitespace().map(str::to_owned).collect();
        choose(&names, want).map(|files| files.join(" ")).map_err(|error| error.to_string())
    }

    fn quant(text: &str) -> Want {
        Want::Quant(text.to_owned())
    }

    const QUANTS: &str = "m-IQ4_XS.gguf m-Q4_K_S.gguf m-UD-Q4_K_XL.gguf m.Q2_K.gguf z-Q4_XS.gguf";
    const SPLIT: &str = "Q8_0/m-Q8_0-00002-of-00002.gguf Q8_0/m-Q8_0-00001-of-00002.gguf m-F16-00001-of-00003.gguf";

    #[test]
    fn choices_are_llama_cpps() {
        let parts = "Q8_0/m-Q8_0-00001-of-00002.gguf Q8_0/m-Q8_0-00002-of-00002.gguf";
        for (names, want, expected) in [
            ("m-F16.gguf m-Q4_K_M.gguf m-Q8_0.gguf mmproj-Q4_K_M.gguf README.md", Want::Usual, "m-Q4_K_M.gguf"),
            ("m-F16.gguf m-q8_0.gguf", Want::Usual, "m-q8_0.gguf"),
            ("mmproj-a.gguf m-Z.gguf m-A.gguf", Want::Usual, "m-A.gguf"),
            ("../../m-Q4_K_M.gguf /m-Q4_K_M.gguf a\\m-Q4_K_M.gguf m-Q8_0.gguf", Want::Usual, "m-Q8_0.gguf"),
            (QUANTS, quant("q4_k_s"), "m-Q4_K_S.gguf"),
            (QUANTS, quant("Q2_K"), "m.Q2_K.gguf"),
            (QUANTS, quant("UD-Q4_K_XL"), "m-UD-Q4_K_XL.gguf"),
            (QUANTS, quant("Q4_XS"), "z-Q4_XS.gguf"),
            ("m-IQ4_XS.gguf", quant("Q4_XS"), "m-IQ4_XS.gguf"),
            (SPLIT, Want::Usual, parts),
            (SPLIT, quant("q8_0"), parts),
            (SPLIT, Want::File("Q8_0/m-Q8_0-00002-of-00002.gguf".into()), parts),
        ] {
            assert_eq!(chosen(names, &want).as_deref(), Ok(expected), "{want:?} of {names}");
        }
        for (names, want, part) in [
            (QUANTS, quant("Q4_K"), "'Q4_K'; there are IQ4_XS, Q2_K, Q4_K_S, Q4_K_XL, Q4_XS"),
            (SPLIT, quant("F16"), "a part of 3, and 'm-F16-00002-of-00003.gguf' is not there"),
            ("README.md a.bin", Want::Usual, "no GGUF file of a model; there is README.md, a.bin"),
            ("a.gguf b.md", Want::File("c.gguf".into()), "'c.gguf'; its GGUF files are a.gguf"),
            ("../../m.gguf", Want::File("../../m.gguf".into()), "it has no file"),
            ("", Want::Usual, "it has no GGUF file of a model"),
        ] {
            let error = chosen(names, &want).unwrap_err();
            assert!(error.contains(part), "{names}: {error}");
        }
        for wrong in ["m-00001-of-99999.gguf", "m-00003-of-00002.gguf"] {
            assert_eq!(parts_of(wrong).len(), 1, "{wrong}");
        }
    }
}
