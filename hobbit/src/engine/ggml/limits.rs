//! Limits on texts for llama.cpp, whose parsers recurse with their nesting: too deep a text would end the process.
//!
//! llama.cpp converts a JSON schema to a grammar (`common/json-schema.cpp`, `json-schema-to-grammar.cpp`). It follows
//! references by recursion, endlessly if they form a cycle, processes names by recursion per character, and takes
//! cubic time in an object's optional properties.

use std::collections::BTreeSet;
use std::thread;

use serde_json::Value;

// Stack.

/// Bytes of stack that any thread is expected to have left.
pub(crate) const ANY_THREAD: usize = 512 << 10;

/// Runs `work` with `bytes` of stack, on a thread of its own if that is more than [`ANY_THREAD`].
///
/// # Errors
/// The system refuses the memory or the thread.
pub(crate) fn with_stack<T: Send>(bytes: usize, work: impl FnOnce() -> T + Send) -> Result<T, String> {
    if bytes <= ANY_THREAD {
        return Ok(work());
    }
    thread::scope(|scope| {
        let worker = thread::Builder::new().stack_size((1 << 20) + bytes).spawn_scoped(scope, work);
        let worker =
            worker.map_err(|error| format!("not enough memory for the stack that this input needs: {error}"))?;
        worker.join().map_err(|_| "reading it has failed".to_owned())
    })
}

/// Nesting of brackets in an answer that any thread can parse: llama.cpp's parsers use about 2.5 KiB of stack per
/// level.
const SHALLOW: usize = 100;

/// Deepest nesting in an answer that is parsed at all. Unclosed brackets, such as intervals in mathematics, count as
/// well.
pub(crate) const ANSWER_DEPTH_MAX: usize = 5000;

/// Bytes of stack per level of an answer.
const ANSWER_LEVEL_BYTES: usize = 6 << 10;

/// Runs `read` with enough stack for its recursion, which follows the brackets of an answer (given in parts).
///
/// # Errors
/// Brackets that are nested too deep, or no memory for the stack.
pub(crate) fn with_stack_for<T: Send>(answer: &[&str], read: impl FnOnce() -> T + Send) -> Result<T, String> {
    let depth = open_brackets(answer);
    if depth <= SHALLOW {
        return Ok(read());
    }
    if depth > ANSWER_DEPTH_MAX {
        return Err(format!("brackets are nested more than {ANSWER_DEPTH_MAX} deep"));
    }
    with_stack((1 << 20) + depth * ANSWER_LEVEL_BYTES, read)
}

// Nesting.

/// Largest number of `opening` bytes that are open at once.
fn deepest(bytes: impl Iterator<Item = u8>, opening: &[u8], closing: &[u8]) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for byte in bytes {
        if opening.contains(&byte) {
            open += 1;
        } else if closing.contains(&byte) {
            open = open.saturating_sub(1);
        }
        most = most.max(open);
    }
    most
}

/// Largest number of open brackets, including those in strings.
pub(crate) fn open_brackets(parts: &[&str]) -> usize {
    deepest(parts.iter().flat_map(|part| part.bytes()), b"[{", b"]}")
}

/// Largest number of open parentheses.
pub(crate) fn open_parentheses(text: &str) -> usize {
    deepest(text.bytes(), b"(", b")")
}

/// Largest number of open brackets outside strings.
fn json_depth(text: &str) -> usize {
    let (mut in_string, mut escaped) = (false, false);
    let outside = text.bytes().filter(|byte| {
        if in_string {
            in_string = escaped || *byte != b'"';
            escaped = !escaped && *byte == b'\\';
            return false;
        }
        in_string = *byte == b'"';
        true
    });
    deepest(outside, b"[{", b"]}")
}

/// Deepest nesting of brackets in JSON that is accepted.
pub(crate) const DEPTH_MAX: usize = 100;

/// Longest JSON that is accepted, in bytes.
const BYTES_MAX: usize = 64 << 20;

/// Reads JSON within the limits of length and depth.
///
/// # Errors
/// The problem with `what`.
pub(crate) fn read_json(text: &str, what: &str) -> Result<Value, String> {
    check_depth(text, what)?;
    serde_json::from_str(text).map_err(|error| format!("{what}: this is not JSON: {error}"))
}

/// Checks the length of `text`, and its depth if it is JSON.
///
/// # Errors
/// The problem with `what`.
pub(crate) fn check_depth(text: &str, what: &str) -> Result<(), String> {
    if text.len() > BYTES_MAX {
        return Err(format!("{what}: {} bytes are too many, at most {BYTES_MAX} are read", text.len()));
    }
    if json_depth(text) > DEPTH_MAX {
        return Err(format!("{what}: brackets are nested more than {DEPTH_MAX} deep"));
    }
    Ok(())
}

// Schemas.

/// Longest name or reference, in bytes.
pub(crate) const NAME_MAX: usize = 512;
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
pub(crate) fn schema_stack(schema: &Value) -> Result<usize, String> {
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
                if pattern.len() <= PATTERN_MAX && open_parentheses(pattern) <= PATTERN_NESTING_MAX =>
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
    fn depths() {
        for (text, expected) in [
            ("", 0),
            ("1", 0),
            ("[]", 1),
            ("[[], {\"a\": [1]}]", 3),
            ("\"[[[\"", 0),
            ("[\"\\\"[[\", \"\\\\\", [] ]", 2),
            ("]]]][", 1),
        ] {
            assert_eq!(json_depth(text), expected, "{text}");
        }
    }

    #[test]
    fn answers_get_the_stack_that_they_need() {
        let own = std::thread::current().id();
        let id = || std::thread::current().id();
        assert_eq!(with_stack_for(&["plain [text]"], id), Ok(own));
        assert_eq!(with_stack(ANY_THREAD, id), Ok(own));
        assert_ne!(with_stack(ANY_THREAD + 1, id), Ok(own));
        assert!(with_stack(usize::MAX >> 2, id).is_err(), "there is no such memory");
        assert_ne!(with_stack_for(&[&"[0, 1) ".repeat(SHALLOW + 1)], id), Ok(own));
        let (prompt, answer) = ("[".repeat(SHALLOW), "[");
        assert_ne!(with_stack_for(&[&prompt, answer], id), Ok(own), "the text before it counts");
        assert!(with_stack_for(&[&"[".repeat(ANSWER_DEPTH_MAX + 1)], id).unwrap_err().contains("deep"));
        assert_eq!(open_brackets(&["[\"[\" ]]] {"]), 2);
    }

    #[test]
    fn refusals_name_the_text() {
        let nested = |n: usize| "[".repeat(n) + &"]".repeat(n);
        assert!(read_json(&nested(DEPTH_MAX), "tools").is_ok());
        let deep = read_json(&nested(DEPTH_MAX + 1), "tools").unwrap_err();
        assert!(deep.contains("tools") && deep.contains("100 deep"), "{deep}");
        let endless = read_json(&"[".repeat(1_000_000), "tools").unwrap_err();
        assert!(endless.contains("deep"), "{endless}");
        let none = read_json("{\"a\": ", "messages").unwrap_err();
        assert!(none.contains("messages: this is not JSON"), "{none}");
    }

    #[test]
    fn usual_schemas_need_little_stack() {
        let schema = json!({
            "type": "object",
            "properties": {"next": {"$ref": "#"}, "a": {"$ref": "#/$defs/a"}},
            "$defs": {"a": {"anyOf": [{"type": "string", "pattern": "^(a|b)+$"}, {"$ref": "#/$defs/a"}]}},
            "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}}}],
        });
        assert!(schema_stack(&schema).unwrap() <= 256 << 10);
    }

    #[test]
    fn endless_schemas_are_refused() {
        let own = json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/a"}]});
        assert!(schema_stack(&own).unwrap_err().contains("leads to itself"));
        let round = json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"});
        assert!(schema_stack(&round).unwrap_err().contains("leads to itself"));
        let chain: serde_json::Map<String, Value> = (0..100_000)
            .map(|n| (format!("d{n}"), json!({"items": {"$ref": format!("#/$defs/d{}", n + 1)}})))
            .collect();
        let chain = json!({"$defs": chain, "$ref": "#/$defs/d0"});
        assert!(schema_stack(&chain).unwrap_err().contains("too many"));
    }

    #[test]
    fn names_patterns_and_properties_are_bounded() {
        let object = |names: Vec<String>| {
            let properties: serde_json::Map<String, Value> = names.into_iter().map(|name| (name, json!({}))).collect();
            json!({"type": "array", "items": {"properties": properties}})
        };
        let names = |n: usize| (0..n).map(|n| format!("p{n}")).collect::<Vec<_>>();
        assert!(schema_stack(&object(names(PROPERTIES_MAX))).is_ok());
        assert!(schema_stack(&object(names(PROPERTIES_MAX + 1))).unwrap_err().contains("properties"));
        assert!(schema_stack(&object(vec!["a".repeat(20_000)])).unwrap_err().contains("name"));
        assert!(schema_stack(&json!({"$ref": format!("#/{}", "%".repeat(10_000))})).unwrap_err().contains("$ref"));
        assert!(schema_stack(&json!({"pattern": format!("^{}$", "(".repeat(100))})).unwrap_err().contains("pattern"));
        let patterns = |n: usize| json!({"anyOf": vec![json!({"type": "string", "pattern": "^a$"}); n]});
        assert!(schema_stack(&patterns(PATTERNS_MAX)).is_ok());
        assert!(schema_stack(&patterns(PATTERNS_MAX + 1)).unwrap_err().contains("patterns"));
        let mut deep = json!({"anyOf": vec![json!({"const": 1}); 10_000]});
        for _ in 0..40 {
            deep = json!({"properties": {"n".repeat(NAME_MAX): deep}});
        }
        assert!(schema_stack(&deep).unwrap_err().contains("names of properties within each other"));
        let mut all = object(names(100));
        all["allOf"] = json!([{"anyOf": [{}, {}, {}]}, {}, {}, {}]);
        assert!(schema_stack(&all).unwrap_err().contains("allOf"));
    }
}
