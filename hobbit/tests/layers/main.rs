//! The order of the library's rooms: `src/lib.rs` draws it in a table, and no source goes against it.
//!
//! * A room knows only rooms in earlier rows of the table, none beside it in its own row.
//! * In every folder the modules beside each other, each with all that is below it, form no circle.
//! * A circle of files is never larger than a module and its own children.
//!
//! What counts is where a name is defined: re-exports are looked through. Code under `cfg(test)` and imports for
//! documentation alone may look anywhere.

mod graph;
mod sources;

use std::collections::BTreeMap;
use std::path::Path;

use graph::circles;
use sources::{Import, ModulePath, Sources, show};

/// The rows of the table in lib.rs: the rooms that stand in it.
fn order(lib: &str) -> Vec<Vec<String>> {
    let rows = lib.lines().filter_map(|line| line.strip_prefix("//! | `"));
    let rooms = |row: &str| {
        let cell = format!("`{}", row.split('|').next().unwrap_or_default());
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    rows.map(rooms).collect()
}

/// Every import against the rules, in words.
fn faults(src: &Path) -> Vec<String> {
    let sources = Sources::read(src);
    let lib = std::fs::read_to_string(src.join("lib.rs")).unwrap();
    let mut faults = against_order(&sources, &order(&lib));
    faults.extend(circles_of_folders(&sources));
    faults.extend(large_circles(&sources));
    faults
}

fn against_order(sources: &Sources, order: &[Vec<String>]) -> Vec<String> {
    let row_of = |room: &str| order.iter().position(|row| row.iter().any(|name| name == room));
    let mut faults = Vec::new();
    let rooms = sources.children(&[]);
    for room in &rooms {
        if row_of(room).is_none() {
            faults.push(format!("lib.rs: room `{room}` is not in the table of rooms; give it its place there"));
        }
    }
    for room in order.iter().flatten().filter(|room| !rooms.contains(room)) {
        faults.push(format!("lib.rs: the table names a room `{room}` that there is not"));
    }
    for import in &sources.imports {
        let (Some(from), Some(to)) = (import.from.first(), import.to.first()) else { continue };
        let (Some(own), Some(other)) = (row_of(from), row_of(to)) else { continue };
        if from != to && other >= own {
            faults.push(format!(
                "{}: room `{from}` knows only the rooms above it in the table of lib.rs, and `{to}` is not above it",
                import.place()
            ));
        }
    }
    faults
}

/// Circles among the modules beside each other in a folder.
fn circles_of_folders(sources: &Sources) -> Vec<String> {
    let mut faults = Vec::new();
    // Of the rooms themselves the order says more.
    for folder in sources.folders().iter().filter(|folder| !folder.is_empty()) {
        let depth = folder.len();
        let mut edges: BTreeMap<(String, String), &Import> = BTreeMap::new();
        for import in &sources.imports {
            let child = |path: &ModulePath| path.starts_with(folder).then(|| path.get(depth).cloned()).flatten();
            if let (Some(from), Some(to)) = (child(&import.from), child(&import.to))
                && from != to
            {
                edges.entry((from, to)).or_insert(import);
            }
        }
        for circle in circles(edges.keys()) {
            let rule = format!("modules beside each other in `{}` go in a circle", show(folder));
            faults.push(told(&rule, &circle, |from, to| edges.get(&(from.clone(), to.clone())).copied()));
        }
    }
    faults
}

/// Circles of files that are more than a module and its own children.
fn large_circles(sources: &Sources) -> Vec<String> {
    let mut edges: BTreeMap<(ModulePath, ModulePath), &Import> = BTreeMap::new();
    for import in &sources.imports {
        // lib.rs shows the library's face and is nobody's neighbour. What a module shows of its own children it need not
        // know: who uses it is taken to import from there.
        let is_face = import.from.is_empty() || import.to.is_empty();
        let is_shown = import.is_shown && import.to.starts_with(&import.from);
        if !is_face && !is_shown && import.from != import.to {
            edges.entry((import.from.clone(), import.to.clone())).or_insert(import);
        }
    }
    let mut faults = Vec::new();
    for circle in circles(edges.keys()) {
        let top = circle.iter().min_by_key(|path| path.len()).expect("a circle has members");
        let is_family =
            |path: &ModulePath| path == top || path.split_last().is_some_and(|(_, above)| above == &top[..]);
        if !circle.iter().all(is_family) {
            let rule = "a circle of files is larger than a module and its own children";
            faults.push(told(rule, &circle, |from, to| edges.get(&(from.clone(), to.clone())).copied()));
        }
    }
    faults
}

/// A circle in words: the rule, and one import for each pair of its members.
fn told<'a, T>(rule: &str, circle: &[T], import: impl Fn(&T, &T) -> Option<&'a Import>) -> String {
    let pairs = circle.iter().flat_map(|from| circle.iter().map(move |to| (from, to)));
    let lines: Vec<String> =
        pairs.filter_map(|(from, to)| Some(format!("\n    {}", import(from, to)?.place()))).collect();
    format!("{rule}: break it at one of{}", lines.concat())
}

#[test]
fn the_library_keeps_its_order() {
    let faults = faults(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

/// A library of these files, by name and text.
fn faults_of(files: &[(&str, &str)]) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    faults(dir.path())
}

const LIB: (&str, &str) = (
    "lib.rs",
    "//! | `low` `beside` | nouns |\n//! | `high` | verbs |\npub mod beside;\npub mod high;\npub mod low;\n",
);

#[test]
fn what_is_above_may_be_known_and_nothing_else() {
    let high = ("high.rs", "use crate::low::Noun;\npub fn verb(_: Noun) {}\n");
    assert_eq!(faults_of(&[LIB, high, ("low.rs", "pub struct Noun;\n"), ("beside.rs", "")]), [""; 0]);

    for (low, line) in [
        ("use crate::high::verb;\n", 1),
        ("\nfn f() {\n    crate::high::verb();\n}\n", 3),
        ("use crate::high;\nfn f() {\n    high::verb();\n}\n", 1),
        ("fn f() {\n    println!(\"{}\", super::high::verb());\n}\n", 2),
    ] {
        let found = faults_of(&[LIB, ("high.rs", "pub fn verb() {}\n"), ("low.rs", low), ("beside.rs", "")]);
        let expected = format!("low.rs:{line}: `");
        let first = found.first().unwrap();
        assert!(first.starts_with(&expected) && first.contains("`high`"), "{found:?}");
    }
    // Rooms of a row are strangers, and a re-export is looked through.
    let found = faults_of(&[
        LIB,
        ("high.rs", ""),
        ("low.rs", "pub use crate::beside::Noun;"),
        ("beside.rs", "pub struct Noun;"),
    ]);
    assert_eq!(found.len(), 1, "{found:?}");
    let high = ("high.rs", "mod part;\npub use part::verb;\n");
    let part = ("high/part.rs", "pub fn verb() {}\n");
    let found = faults_of(&[LIB, high, part, ("low.rs", "use crate::high::verb;"), ("beside.rs", "")]);
    assert!(found[0].contains("low.rs:1: `crate::high::verb`"), "{found:?}");
    // Tests may look up.
    let low = ("low.rs", "#[cfg(test)]\nmod tests {\n    use crate::high::verb;\n}\n");
    assert_eq!(faults_of(&[LIB, ("high.rs", "pub fn verb() {}"), low, ("beside.rs", "")]), [""; 0]);
}

#[test]
fn a_room_without_a_place_is_a_fault() {
    let lib = ("lib.rs", "//! | `low` `gone` | nouns |\npub mod high;\npub mod low;\n");
    let found = faults_of(&[lib, ("high.rs", ""), ("low.rs", "")]);
    assert_eq!(found.len(), 2, "{found:?}");
}

#[test]
fn circles_in_a_room_are_found() {
    let lib = ("lib.rs", "//! | `room` | all |\npub mod room;\n");
    let room = ("room/mod.rs", "mod a;\nmod b;\nmod c;\npub use a::A;\npub use b::B;\npub use c::C;\n");
    // Through the names that the room shows.
    let a = ("room/a.rs", "use super::B;\npub struct A(Box<B>);\n");
    let b = ("room/b.rs", "use super::C;\npub struct B(Box<C>);\n");
    let found = faults_of(&[lib, room, a, b, ("room/c.rs", "use super::A;\npub struct C(Box<A>);\n")]);
    assert!(found[0].contains("modules beside each other in `room`"), "{found:?}");
    for place in ["room/a.rs:1: `super::B`", "room/b.rs:1: `super::C`", "room/c.rs:1: `super::A`"] {
        assert!(found[0].contains(place), "{place}: {found:?}");
    }
    assert_eq!(faults_of(&[lib, room, a, b, ("room/c.rs", "pub struct C;\n")]), [""; 0]);
}

#[test]
fn a_module_and_its_children_may_know_each_other_and_no_more() {
    let lib = ("lib.rs", "//! | `room` | all |\npub mod room;\n");
    let room = ("room/mod.rs", "mod a;\npub struct Noun;\npub fn make() -> a::A {\n    a::A(Noun)\n}\n");
    let a = ("room/a.rs", "use super::Noun;\npub struct A(pub Noun);\n");
    assert_eq!(faults_of(&[lib, room, a]), [""; 0]);
    // Through a grandchild.
    let a = ("room/a.rs", "mod b;\npub struct A(pub b::B);\n");
    let found = faults_of(&[lib, room, a, ("room/a/b.rs", "pub type B = crate::room::Noun;\n")]);
    assert!(found[0].contains("larger than a module and its own children"), "{found:?}");
}
