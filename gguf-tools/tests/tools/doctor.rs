//! `doctor`: the page's parts, its JSON, and that it names no place of the machine.

use serde_json::Value;

use crate::*;

/// Words that stand for a place: the model's directory, this checkout, the home directory.
fn places(model: &Path) -> Vec<String> {
    let directories = [model.parent().map(Path::to_owned), std::env::current_dir().ok(), std::env::home_dir()];
    let named = directories.into_iter().flatten().filter(|place| place.components().count() > 1);
    named.map(|place| place.display().to_string()).collect()
}

#[track_caller]
fn assert_no_place(text: &str, model: &Path) {
    for place in places(model) {
        assert!(!text.contains(&place), "'{place}' is in:\n{text}");
    }
}

#[test]
fn a_page_for_a_bug_report() {
    let dir = tempfile::Builder::new().prefix("jo doe").tempdir().unwrap();
    let (model, _) = random(dir.path(), &small_spec());
    let page = succeed(&["doctor", word(&model), "--quick"]).out;
    let parts =
        ["\nspeed ", "\nprocessor ", "\nkernels ", "\nmemory ", "\nbudget ", "\ndisk ", "\ndevice", "\nprogram "];
    assert_contains(&page, &parts);
    assert_eq!(page.contains("\nlimits "), cfg!(target_os = "linux"), "{page}");
    // It fits wherever this test runs.
    assert_contains(&page, &["use llama.cpp", "\ncommand     llama-cli -m random.gguf\n", "decode, exact"]);
    let exactness = page.lines().find(|line| line.starts_with("exactness   CPU: ")).unwrap();
    let is_slow =
        exactness.contains("run it again when the machine is idle") || exactness.contains("time for this page");
    assert!(is_slow || exactness.ends_with("bit for bit, in all 17 evaluations"), "{page}");
    assert_no_place(&page, &model);
    assert!(page.lines().all(|line| line.chars().count() <= 110), "{page}");
}

#[test]
fn the_page_as_json() {
    let dir = tempfile::tempdir().unwrap();
    let (model, _) = random(dir.path(), &small_spec());
    let ran = succeed(&["doctor", word(&model), "--quick", "--json"]);
    assert_no_place(&ran.out, &model);
    let page: Value = serde_json::from_str(&ran.out).unwrap();
    for text in ["hobbit", "system", "llama_cpp"] {
        assert!(page[text].is_string(), "{text}: {page:#}");
    }
    for list in ["/backends", "/processor/used", "/processor/limits", "/disk/reads", "/exactness"] {
        assert!(page.pointer(list).is_some_and(Value::is_array), "{list}: {page:#}");
    }
    let reads = page["disk"]["reads"].as_array().unwrap();
    // A part that cannot be measured says why.
    let is_told = |reads: &Value| reads["bytes_per_second"].is_number() || reads["not_measured"].is_string();
    assert!(reads.len() >= 4 && reads.iter().all(is_told), "{reads:#?}");
    assert_eq!((&page["disk"]["is_expert"], &page["model"]["file"]), (&true.into(), &"random.gguf".into()));
    assert_eq!(
        (&page["model"]["choice"]["program"], &page["exactness"][0]["on"]),
        (&"llama-cpp".into(), &"CPU".into())
    );
    assert!(page["model"]["forecast"]["forecast"]["expected"]["tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(page["seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn models_that_cannot_be_read_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (model, _) = random(dir.path(), &small_spec());
    refused(1, &["doctor", word(&dir.path().join("absent.gguf"))], "absent.gguf");
    let bytes = fs::read(&model).unwrap();
    fs::write(&model, &bytes[..bytes.len() / 2]).unwrap();
    refused(1, &["doctor", word(&model)], "random.gguf: truncated");
    refused(2, &["doctor", "--ram", "8"], "8GiB");
    refused(2, &["doctor", "--on", "CPU"], "--job");
    let help = succeed(&["doctor", "--help"]).out;
    assert!(help.contains("gguf-tools doctor model.gguf") && !help.contains("--job"), "{help}");
}
