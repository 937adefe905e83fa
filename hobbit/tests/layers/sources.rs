//! The library's modules, and what each imports from where.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::slice::from_ref;

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, Meta, UseTree, Visibility};

/// A module's names from the crate's root on; empty for lib.rs.
pub type ModulePath = Vec<String>;

/// For messages.
pub fn show(path: &[String]) -> String {
    if path.is_empty() { "lib.rs".to_owned() } else { path.join("::") }
}

/// One file names something of another.
pub struct Import {
    /// Module of the file that names it.
    pub from: ModulePath,
    /// Module of the file that defines it.
    pub to: ModulePath,
    /// Whether it is shown on: `pub use`.
    pub is_shown: bool,
    file: String,
    line: usize,
    words: String,
}

impl Import {
    /// `cache/mod.rs:3: `crate::options::Word``.
    pub fn place(&self) -> String {
        format!("{}:{}: `{}`", self.file, self.line, self.words)
    }
}

/// All modules of a library.
#[derive(Default)]
pub struct Sources {
    modules: BTreeMap<ModulePath, Module>,
    /// Sorted out: each from one file to another.
    pub imports: Vec<Import>,
}

/// A module, be it a file or a part of one.
#[derive(Default)]
struct Module {
    /// The module whose file it is in.
    owner: ModulePath,
    file: String,
    /// What it defines itself.
    names: BTreeSet<String>,
    /// What it has by another name: the name, and the path as written.
    imported: Vec<(String, Vec<String>)>,
    /// Modules all of whose names it has.
    globs: Vec<Vec<String>>,
    /// Every path in it that may lead elsewhere.
    named: Vec<Named>,
}

struct Named {
    path: Vec<String>,
    line: usize,
    is_shown: bool,
}

impl Sources {
    /// Reads `src/lib.rs` and every module that it leads to. Modules and items for tests alone are left out.
    pub fn read(src: &Path) -> Self {
        let mut sources = Self::default();
        sources.read_file(src, &src.join("lib.rs"), Vec::new());
        sources.resolve();
        sources
    }

    /// The modules directly below one.
    pub fn children(&self, folder: &[String]) -> Vec<String> {
        let is_child = |path: &&ModulePath| path.len() == folder.len() + 1 && path.starts_with(folder);
        let files = self.modules.iter().filter(|(path, module)| module.owner == **path).map(|(path, _)| path);
        files.filter(is_child).map(|path| path[folder.len()].clone()).collect()
    }

    /// Every module that has others below it.
    pub fn folders(&self) -> BTreeSet<ModulePath> {
        self.modules.keys().filter_map(|path| Some(path.split_last()?.1.to_vec())).collect()
    }

    fn read_file(&mut self, src: &Path, file: &Path, path: ModulePath) {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let syntax = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let name = file.strip_prefix(src).unwrap().display().to_string();
        self.read_items(src, file, &name, &syntax.items, path.clone(), &path);
    }

    fn read_items(
        &mut self,
        src: &Path,
        file: &Path,
        name: &str,
        items: &[Item],
        path: ModulePath,
        owner: &ModulePath,
    ) {
        let mut module = Module { owner: owner.clone(), file: name.to_owned(), ..Module::default() };
        let mut below = Vec::new();
        for item in items.iter().filter(|item| !is_left_out(attributes(item))) {
            if let Item::Mod(child) = item {
                below.push(child);
                continue;
            }
            module.names.extend(defined(item));
            let mut reader = Reader { module: &mut module };
            reader.visit_item(item);
        }
        self.modules.insert(path.clone(), module);
        for child in below {
            let child_path = [&path[..], &[child.ident.to_string()]].concat();
            match &child.content {
                Some((_, items)) => self.read_items(src, file, name, items, child_path, owner),
                None => self.read_file(src, &file_of(file, &path, owner, child), child_path),
            }
        }
    }

    fn resolve(&mut self) {
        let mut imports = Vec::new();
        for (path, module) in &self.modules {
            for named in &module.named {
                let Some(to) = self.definer(path, &named.path, &mut Vec::new()) else { continue };
                if to != module.owner {
                    imports.push(Import {
                        from: module.owner.clone(),
                        to,
                        is_shown: named.is_shown,
                        file: module.file.clone(),
                        line: named.line,
                        words: named.path.join("::"),
                    });
                }
            }
        }
        imports.sort_by(|a, b| (&a.file, a.line).cmp(&(&b.file, b.line)));
        self.imports = imports;
    }

    /// The module of the file that defines what `path` means within `module`; `None` where that is no file of ours.
    fn definer(
        &self,
        module: &ModulePath,
        path: &[String],
        seen: &mut Vec<(ModulePath, String)>,
    ) -> Option<ModulePath> {
        let (first, rest) = path.split_first()?;
        let (start, rest) = match first.as_str() {
            "crate" => (Vec::new(), rest),
            "self" => (module.clone(), rest),
            "super" => {
                let n_up = path.iter().take_while(|name| *name == "super").count();
                (module[..module.len().checked_sub(n_up)?].to_vec(), &path[n_up..])
            }
            _ => {
                // A name that is in scope, or another crate's.
                let is_known = self.modules.contains_key(&[&module[..], from_ref(first)].concat())
                    || self.modules[module].imported.iter().any(|(name, _)| name == first);
                return is_known.then(|| self.find(module.clone(), path, seen)).flatten();
            }
        };
        self.find(start, rest, seen)
    }

    /// As [`Sources::definer`], of a path that begins in `module`.
    fn find(&self, module: ModulePath, path: &[String], seen: &mut Vec<(ModulePath, String)>) -> Option<ModulePath> {
        let own = self.modules.get(&module)?;
        let Some((first, rest)) = path.split_first() else { return Some(own.owner.clone()) };
        let child = [&module[..], from_ref(first)].concat();
        if self.modules.contains_key(&child) {
            return self.find(child, rest, seen);
        }
        if own.names.contains(first) || seen.contains(&(module.clone(), first.clone())) {
            return Some(own.owner.clone());
        }
        seen.push((module.clone(), first.clone()));
        if let Some((_, target)) = own.imported.iter().find(|(name, _)| name == first) {
            let target = [&target[..], rest].concat();
            return self.definer(&module, &target, seen);
        }
        for glob in &own.globs {
            if let Some(from) = self.definer(&module, &[&glob[..], path].concat(), seen)
                && self.modules[&from].names.contains(first)
            {
                return Some(from);
            }
        }
        // Made by a macro, say.
        Some(own.owner.clone())
    }
}

/// Where the file of `mod child;` is.
fn file_of(file: &Path, path: &ModulePath, owner: &ModulePath, child: &ItemMod) -> PathBuf {
    let is_root = matches!(file.file_name().and_then(|name| name.to_str()), Some("mod.rs" | "lib.rs"));
    let mut folder = if is_root { file.parent().unwrap().to_owned() } else { file.with_extension("") };
    // Within `mod part { mod child; }`.
    folder.extend(&path[owner.len()..]);
    let flat = folder.join(format!("{}.rs", child.ident));
    if flat.exists() { flat } else { folder.join(child.ident.to_string()).join("mod.rs") }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Whether an item is there for tests or for documentation alone.
fn is_left_out(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => {
            let words = list.tokens.to_string().replace(' ', "");
            words == "test" || words == "doc" || words.starts_with("all(test,")
        }
        _ => false,
    })
}

fn defined(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

/// Collects the paths of an item.
struct Reader<'a> {
    module: &'a mut Module,
}

impl Reader<'_> {
    fn name(&mut self, path: Vec<String>, span: Span, is_shown: bool) {
        self.module.named.push(Named { path, line: span.start().line, is_shown });
    }

    fn read_use(&mut self, tree: &UseTree, before: &[String], is_shown: bool) {
        let join = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(tree) => self.read_use(&tree.tree, &join(&tree.ident), is_shown),
            UseTree::Group(tree) => tree.items.iter().for_each(|tree| self.read_use(tree, before, is_shown)),
            UseTree::Glob(tree) => {
                self.module.globs.push(before.to_vec());
                self.name(before.to_vec(), tree.star_token.spans[0], is_shown);
            }
            UseTree::Name(tree) if tree.ident == "self" => {
                self.import(before.last().cloned().unwrap_or_default(), before.to_vec(), tree.ident.span(), is_shown);
            }
            UseTree::Name(tree) => self.import(tree.ident.to_string(), join(&tree.ident), tree.ident.span(), is_shown),
            UseTree::Rename(tree) if tree.ident == "self" => {
                self.import(tree.rename.to_string(), before.to_vec(), tree.ident.span(), is_shown);
            }
            UseTree::Rename(tree) => {
                self.import(tree.rename.to_string(), join(&tree.ident), tree.ident.span(), is_shown);
            }
        }
    }

    fn import(&mut self, name: String, path: Vec<String>, span: Span, is_shown: bool) {
        self.name(path.clone(), span, is_shown);
        self.module.imported.push((name, path));
    }

    /// The paths in what a macro is given, which may be no Rust at all.
    fn read_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut start = Span::call_site();
        let mut n_colons = 0;
        for token in tokens {
            match &token {
                TokenTree::Ident(word) if n_colons == 2 && !path.is_empty() => path.push(word.to_string()),
                TokenTree::Ident(word) => {
                    self.end_path(&mut path, start);
                    path = vec![word.to_string()];
                    start = word.span();
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' && !path.is_empty() => {
                    n_colons += 1;
                    continue;
                }
                TokenTree::Group(group) => {
                    self.end_path(&mut path, start);
                    debug_assert!(group.delimiter() != Delimiter::None || group.stream().is_empty());
                    self.read_tokens(group.stream());
                }
                _ => self.end_path(&mut path, start),
            }
            n_colons = 0;
        }
        self.end_path(&mut path, start);
    }

    fn end_path(&mut self, path: &mut Vec<String>, start: Span) {
        if path.len() > 1 {
            self.name(std::mem::take(path), start, false);
        }
        path.clear();
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_left_out(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.read_use(&item.tree, &[], !matches!(item.vis, Visibility::Inherited));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            let names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.name(names, path.segments[0].ident.span(), false);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.read_tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }

    /// `pub(in super::super)` names no neighbour.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}
