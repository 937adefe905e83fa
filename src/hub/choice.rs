//! Chooses a file of a repository by llama.cpp's rules (`common/download.cpp`).

use super::names::path_within;

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
///
/// # Errors
/// No such file; the error lists those that exist.
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
    let parts = parts(chosen);
    match parts.iter().find(|part| !names.contains(&part.as_str())) {
        Some(missing) => {
            Err(ChoiceError::NoPart { file: chosen.to_owned(), count: parts.len() as u32, missing: missing.clone() })
        }
        None => Ok(parts),
    }
}

/// All parts, in order, of the split model to which `name` belongs; `name` alone if it is no part.
pub fn parts(name: &str) -> Vec<String> {
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

/// The quants that names of models end with, each once.
fn quants(models: &[&str]) -> Vec<String> {
    let quant = |name: &&str| {
        let stem = split(name).map_or_else(|| name.trim_end_matches(".gguf"), |(stem, ..)| stem);
        let word = stem.rsplit(['-', '.', '/']).next()?;
        let is_quant = word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && word != stem;
        is_quant.then(|| word.to_ascii_uppercase())
    };
    let mut quants: Vec<String> = models.iter().filter_map(quant).collect();
    quants.sort_unstable();
    quants.dedup();
    quants
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str], want: &Want) -> Result<Vec<String>, String> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        choose(&names, want).map_err(|error| error.to_string())
    }

    fn quant(text: &str) -> Want {
        Want::Quant(text.to_owned())
    }

    #[test]
    fn the_usual_quant_is_llama_cpps() {
        let all = ["m-F16.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-Q4_K_M.gguf", "README.md"];
        assert_eq!(chosen(&all, &Want::Usual).unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(chosen(&["m-F16.gguf", "m-q8_0.gguf"], &Want::Usual).unwrap(), ["m-q8_0.gguf"]);
        assert_eq!(chosen(&["mmproj-a.gguf", "m-Z.gguf", "m-A.gguf"], &Want::Usual).unwrap(), ["m-A.gguf"]);
    }

    #[test]
    fn a_quant_is_a_word_of_the_name() {
        let all = ["m-IQ4_XS.gguf", "m-Q4_K_S.gguf", "m-UD-Q4_K_XL.gguf", "m.Q2_K.gguf", "z-Q4_XS.gguf"];
        for (typed, file) in [
            ("q4_k_s", "m-Q4_K_S.gguf"),
            ("Q2_K", "m.Q2_K.gguf"),
            ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
            ("Q4_XS", "z-Q4_XS.gguf"),
        ] {
            assert_eq!(chosen(&all, &quant(typed)).unwrap(), [file], "{typed}");
        }
        assert_eq!(chosen(&all[..1], &quant("Q4_XS")).unwrap(), ["m-IQ4_XS.gguf"]);
        let error = chosen(&all, &quant("Q4_K")).unwrap_err();
        assert!(error.contains("'Q4_K'; there are IQ4_XS, Q2_K, Q4_K_S, Q4_K_XL, Q4_XS"), "{error}");
    }

    #[test]
    fn split_models_are_whole() {
        let all = ["Q8_0/m-Q8_0-00002-of-00002.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf", "m-F16-00001-of-00003.gguf"];
        let parts = ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"];
        for want in [Want::Usual, quant("q8_0"), Want::File(parts[1].to_owned())] {
            assert_eq!(chosen(&all, &want).unwrap(), parts, "{want:?}");
        }
        let error = chosen(&all, &quant("F16")).unwrap_err();
        assert!(error.contains("a part of 3, and 'm-F16-00002-of-00003.gguf' is not there"), "{error}");
        assert_eq!(super::parts("m-00001-of-99999.gguf").len(), 1, "a lie about the count");
        assert_eq!(super::parts("m-00003-of-00002.gguf").len(), 1);
    }

    #[test]
    fn what_there_is_instead_is_told() {
        let error = chosen(&["README.md", "model.safetensors"], &Want::Usual).unwrap_err();
        assert!(error.contains("no GGUF file of a model; there is README.md, model.safetensors"), "{error}");
        let error = chosen(&["a.gguf", "b.md"], &Want::File("c.gguf".into())).unwrap_err();
        assert!(error.contains("'c.gguf'; its GGUF files are a.gguf"), "{error}");
        assert_eq!(chosen(&[], &Want::Usual).unwrap_err(), "it has no GGUF file of a model");
    }

    #[test]
    fn names_that_lead_out_are_no_candidates() {
        let all = ["../../m-Q4_K_M.gguf", "/m-Q4_K_M.gguf", "a\\m-Q4_K_M.gguf", "m-Q8_0.gguf"];
        assert_eq!(chosen(&all, &Want::Usual).unwrap(), ["m-Q8_0.gguf"]);
        assert!(chosen(&all, &Want::File(all[0].into())).is_err());
    }
}
