//! Checks JSON schemas before llama.cpp converts them to a grammar (`common/json-schema.cpp`,
//! `json-schema-to-grammar.cpp`).
//!
//! llama.cpp follows references by recursion, endlessly if they form a cycle, processes names by recursion per
//! character, and takes cubic time in an object's optional properties.

use std::collections::BTreeSet;

use serde_json::Value;

/// Longest name or reference, in bytes.
pub(super) const NAME_MAX: usize = 512;
/// Longest pattern in bytes; the next constant limits its nested parentheses.
const PATTERN_MAX: usize = 4 << 10;
const PATTERN_NESTING_MAX: usize = 64;
/// Maximum number of patterns: llama.cpp copies all rules it has for each.
const PATTERNS_MAX: usize = 512;
/// Total bytes of the property names on the paths to all parts of a schema: llama.cpp names its rules by these paths.
const PATHS_MAX: usize = 8 << 20;
/// Maximum properties of one object.
const PROPERTIES_MAX: usize = 256;
/// Maximum properties that `allOf` may combine.
const COMBINED_MAX: usize = 512;
/// Maximum chain of references that lead only to another reference.
const HOPS_MAX: usize = 64;
/// Maximum levels of all referenced parts together.
const LEVELS_MAX: usize = 32 << 10;
/// Bytes of stack per level.
const LEVEL_BYTES: usize = 8 << 10;

/// Bytes of stack that llama.cpp needs for a schema.
///
/// # Errors
/// The reason why llama.cpp could not process it.
pub(super) fn stack_bytes(schema: &Value) -> Result<usize, String> {
    let mut found = Found::default();
    found.look(schema, 1, 0)?;
    if found.n_patterns > PATTERNS_MAX {
        return Err(format!("it has more than {PATTERNS_MAX} patterns"));
    }
    if found.combined.saturating_mul(found.widest) > COMBINED_MAX {
        return Err(format!("allOf may put together more than {COMBINED_MAX} properties"));
    }
    for reference in &found.references {
        leads_somewhere(schema, reference)?;
    }
    let levels = (found.references.len() + 1).saturating_mul(found.depth);
    if levels > LEVELS_MAX {
        return Err(format!(
            "{} references to parts of a schema {} deep are too many",
            found.references.len(),
            found.depth
        ));
    }
    Ok(levels * LEVEL_BYTES)
}

#[derive(Default)]
struct Found<'a> {
    references: BTreeSet<&'a str>,
    depth: usize,
    /// Maximum properties of an object.
    widest: usize,
    /// Maximum schemas in an `allOf`, those of an `anyOf` within it included.
    combined: usize,
    n_patterns: usize,
    /// Bytes of property names on all paths.
    paths: usize,
}

impl<'a> Found<'a> {
    /// Recurses with the depth of the JSON, which its parser has bounded.
    fn look(&mut self, value: &'a Value, depth: usize, path: usize) -> Result<(), String> {
        self.depth = self.depth.max(depth);
        self.paths += path;
        if self.paths > PATHS_MAX {
            return Err("the names of properties within each other are too long".to_owned());
        }
        match value {
            Value::Array(values) => values.iter().try_for_each(|value| self.look(value, depth + 1, path)),
            Value::Object(fields) => {
                for (name, value) in fields {
                    self.look_at(name, value)?;
                    self.look(value, depth + 1, path + name.len())?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn look_at(&mut self, name: &str, value: &'a Value) -> Result<(), String> {
        match (name, value) {
            ("$ref", Value::String(reference)) => {
                if reference.len() > NAME_MAX {
                    return Err(format!("a $ref is longer than {NAME_MAX} bytes"));
                }
                self.references.insert(reference);
            }
            ("properties", Value::Object(properties)) => {
                self.widest = self.widest.max(properties.len());
                if properties.len() > PROPERTIES_MAX {
                    return Err(format!("an object has more than {PROPERTIES_MAX} properties"));
                }
                if properties.keys().any(|name| name.len() > NAME_MAX) {
                    return Err(format!("the name of a property is longer than {NAME_MAX} bytes"));
                }
            }
            ("pattern", Value::String(pattern))
                if pattern.len() <= PATTERN_MAX && nesting(pattern) <= PATTERN_NESTING_MAX =>
            {
                self.n_patterns += 1;
            }
            ("pattern", Value::String(_)) => {
                let bound = format!("{PATTERN_MAX} bytes, or {PATTERN_NESTING_MAX} parentheses within each other");
                return Err(format!("a pattern has more than {bound}"));
            }
            ("allOf", Value::Array(schemas)) => {
                let alternatives = |schema: &Value| schema.get("anyOf").and_then(Value::as_array).map_or(1, Vec::len);
                self.combined = self.combined.max(schemas.iter().map(alternatives).sum());
            }
            _ => {}
        }
        Ok(())
    }
}

fn nesting(pattern: &str) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for byte in pattern.bytes() {
        match byte {
            b'(' => open += 1,
            b')' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

/// Checks that a reference is no cycle of references. llama.cpp refuses dangling ones itself.
fn leads_somewhere(root: &Value, reference: &str) -> Result<(), String> {
    let mut at = reference;
    for _ in 0..HOPS_MAX {
        match resolve(root, at).and_then(|found| found.get("$ref")?.as_str()) {
            Some(next) => at = next,
            None => return Ok(()),
        }
    }
    Err(format!("$ref {reference} leads to itself, or over more than {HOPS_MAX} others"))
}

/// As llama.cpp does: names are compared literally, without unescaping.
fn resolve<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    let path = reference.strip_prefix("#/")?;
    path.split('/').try_fold(root, |at, name| match at {
        Value::Object(fields) => fields.get(name),
        Value::Array(values) => values.get(name.parse::<usize>().ok()?),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_usual_takes_little() {
        let schema = json!({
            "type": "object",
            "properties": {"next": {"$ref": "#"}, "a": {"$ref": "#/$defs/a"}},
            "$defs": {"a": {"anyOf": [{"type": "string", "pattern": "^(a|b)+$"}, {"$ref": "#/$defs/a"}]}},
            "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}}}],
        });
        assert!(stack_bytes(&schema).unwrap() <= 256 << 10);
    }

    #[test]
    fn what_would_not_end_is_refused() {
        let own = json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/a"}]});
        assert!(stack_bytes(&own).unwrap_err().contains("leads to itself"));
        let round = json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"});
        assert!(stack_bytes(&round).unwrap_err().contains("leads to itself"));
        let chain: serde_json::Map<String, Value> = (0..100_000)
            .map(|n| (format!("d{n}"), json!({"items": {"$ref": format!("#/$defs/d{}", n + 1)}})))
            .collect();
        let chain = json!({"$defs": chain, "$ref": "#/$defs/d0"});
        assert!(stack_bytes(&chain).unwrap_err().contains("too many"));
    }

    #[test]
    fn names_patterns_and_properties_are_bounded() {
        let object = |names: Vec<String>| {
            let properties: serde_json::Map<String, Value> = names.into_iter().map(|name| (name, json!({}))).collect();
            json!({"type": "array", "items": {"properties": properties}})
        };
        let names = |n: usize| (0..n).map(|n| format!("p{n}")).collect::<Vec<_>>();
        assert!(stack_bytes(&object(names(PROPERTIES_MAX))).is_ok());
        assert!(stack_bytes(&object(names(PROPERTIES_MAX + 1))).unwrap_err().contains("properties"));
        assert!(stack_bytes(&object(vec!["a".repeat(20_000)])).unwrap_err().contains("name"));
        assert!(stack_bytes(&json!({"$ref": format!("#/{}", "%".repeat(10_000))})).unwrap_err().contains("$ref"));
        assert!(stack_bytes(&json!({"pattern": format!("^{}$", "(".repeat(100))})).unwrap_err().contains("pattern"));
        let patterns = |n: usize| json!({"anyOf": vec![json!({"type": "string", "pattern": "^a$"}); n]});
        assert!(stack_bytes(&patterns(PATTERNS_MAX)).is_ok());
        assert!(stack_bytes(&patterns(PATTERNS_MAX + 1)).unwrap_err().contains("patterns"));
        let mut deep = json!({"anyOf": vec![json!({"const": 1}); 10_000]});
        for _ in 0..40 {
            deep = json!({"properties": {"n".repeat(NAME_MAX): deep}});
        }
        assert!(stack_bytes(&deep).unwrap_err().contains("names of properties within each other"));
        let mut all = object(names(100));
        all["allOf"] = json!([{"anyOf": [{}, {}, {}]}, {}, {}, {}]);
        assert!(stack_bytes(&all).unwrap_err().contains("allOf"));
    }
}
