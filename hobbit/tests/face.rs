//! What the library shows to those who use it: a name more is a decision, not an accident.

use std::fs;
use std::path::{Path, PathBuf};

use syn::{Attribute, Item, UseTree, Visibility};

/// What the root shows beside its documented modules.
const NAMES: [&str; 28] = [
    "BatchToken",
    "Budget",
    "CachingOptions",
    "ChatMessage",
    "ChatOptions",
    "DeviceInfo",
    "DeviceKind",
    "DeviceOptions",
    "Error",
    "ExpertCache",
    "Generation",
    "Interrupt",
    "IoMode",
    "LogLevel",
    "Model",
    "ModelInfo",
    "ModelOptions",
    "PhaseStats",
    "PrecisionOptions",
    "Sampler",
    "SamplingOptions",
    "Session",
    "SessionOptions",
    "Stats",
    "StopReason",
    "Token",
    "devices",
    "set_log",
];

/// Modules that are for everybody; the others are for hobbit's own programs.
const MODULES: [&str; 2] = ["options", "stats"];

fn in_package(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn is_hidden(attributes: &[Attribute]) -> bool {
    let is_so = |attribute: &Attribute| attribute.parse_args::<syn::Ident>().is_ok_and(|word| word == "hidden");
    attributes.iter().any(|attribute| attribute.path().is_ident("doc") && is_so(attribute))
}

/// The names that a `use` brings.
fn names(tree: &UseTree, out: &mut Vec<String>) {
    match tree {
        UseTree::Path(tree) => names(&tree.tree, out),
        UseTree::Group(tree) => tree.items.iter().for_each(|tree| names(tree, out)),
        UseTree::Name(tree) => out.push(tree.ident.to_string()),
        UseTree::Rename(tree) => out.push(tree.rename.to_string()),
        UseTree::Glob(_) => out.push("*".to_owned()),
    }
}

#[test]
fn the_root_shows_these_names() {
    let lib = syn::parse_file(&fs::read_to_string(in_package("src/lib.rs")).unwrap()).unwrap();
    let (mut shown, mut modules) = (Vec::new(), Vec::new());
    for item in &lib.items {
        match item {
            Item::Use(item) if matches!(item.vis, Visibility::Public(_)) && !is_hidden(&item.attrs) => {
                names(&item.tree, &mut shown);
            }
            Item::Mod(item) if matches!(item.vis, Visibility::Public(_)) && !is_hidden(&item.attrs) => {
                modules.push(item.ident.to_string());
            }
            Item::Use(_) | Item::Mod(_) => {}
            _ => panic!("lib.rs defines something itself; give it a room"),
        }
    }
    shown.sort();
    assert_eq!(shown, NAMES);
    assert_eq!(modules, MODULES);
}

#[test]
fn the_example_needs_no_more() {
    let text = fs::read_to_string(in_package("examples/generate.rs")).unwrap();
    let file = syn::parse_file(&text).unwrap();
    let mut used = Vec::new();
    for item in &file.items {
        if let Item::Use(item) = item
            && let UseTree::Path(tree) = &item.tree
            && tree.ident == "hobbit"
        {
            names(&tree.tree, &mut used);
        }
    }
    assert!(used.len() > 5 && used.iter().all(|name| NAMES.contains(&name.as_str())), "{used:?}");
    assert!(!text.contains("hobbit::") || text.matches("hobbit::").count() == 1, "one import says all");
}
