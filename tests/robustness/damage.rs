//! Model files that are incomplete, altered, or no model files, given to the real binary.

use std::fs;
use std::path::{Path, PathBuf};

use hobbit_core::gguf::Gguf;
use hobbit_synth::Spec;

use crate::fixture::{self, cli};

/// A sound model in memory, and where its parts lie.
struct Original {
    bytes: Vec<u8>,
    /// First byte of the tensor table.
    table: usize,
    /// One past the tensor table.
    header_end: usize,
    /// First byte of tensor data.
    data: usize,
    /// In the middle of an ordinary tensor's data.
    ordinary: usize,
    /// In the middle of an expert tensor's data.
    expert: usize,
}

fn spec() -> Spec {
    Spec { embd: 64, ff: 64, heads: 2, experts: 4, layers: 2, ..Spec::tiny("llama") }
}

impl Original {
    fn new(dir: &Path) -> Self {
        let path = fixture::write(dir, &spec());
        let bytes = fs::read(&path).unwrap();
        let (header, _) = Gguf::parse_header(&bytes, bytes.len() as u64, &path).unwrap();
        let middle = |name: &str| {
            let tensor = header.tensors.iter().find(|tensor| tensor.name == name).expect("the model has this tensor");
            (tensor.extent.offset + tensor.extent.len / 2) as usize
        };
        let last = header.tensors.last().expect("the model has tensors");
        Self {
            table: place_of_string(&bytes, &header.tensors[0].name) - 8,
            header_end: place_of_string(&bytes, &last.name) + last.name.len() + 16 + 8 * last.dims.len(),
            data: header.data_start as usize,
            ordinary: middle("blk.0.attn_q.weight"),
            expert: middle("blk.1.ffn_down_exps.weight"),
            bytes,
        }
    }
}

/// A sound model's bytes, to be damaged.
struct Bytes(Vec<u8>);

impl Bytes {
    fn put_u32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn put_u64(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// Changes the 32-bit value of a key.
    fn key(&mut self, key: &str, value: u32) {
        let after = place_of_string(&self.0, key) + key.len();
        const U32: [u8; 4] = 4u32.to_le_bytes();
        assert_eq!(self.0[after..after + 4], U32, "{key} is no u32");
        self.put_u32(after + 4, value);
    }

    /// Changes a string of the header into another of the same length.
    fn rename(&mut self, from: &str, to: &str) {
        assert_eq!(from.len(), to.len());
        let at = place_of_string(&self.0, from);
        self.0[at..at + to.len()].copy_from_slice(to.as_bytes());
    }

    /// Position of the table entry of a tensor behind its name: number of dimensions, dimensions, type, offset.
    fn entry(&self, tensor: &str) -> usize {
        place_of_string(&self.0, tensor) + tensor.len()
    }

    fn dimension(&mut self, tensor: &str, d: usize, value: u64) {
        self.put_u64(self.entry(tensor) + 4 + 8 * d, value);
    }

    fn dtype(&mut self, tensor: &str, n_dims: usize, id: u32) {
        self.put_u32(self.entry(tensor) + 4 + 8 * n_dims, id);
    }

    fn offset(&mut self, tensor: &str, n_dims: usize, offset: u64) {
        self.put_u64(self.entry(tensor) + 8 + 8 * n_dims, offset);
    }
}

/// First byte of a string of the header, behind its length.
fn place_of_string(bytes: &[u8], text: &str) -> usize {
    let mut wanted = (text.len() as u64).to_le_bytes().to_vec();
    wanted.extend_from_slice(text.as_bytes());
    let at = bytes.windows(wanted.len()).position(|window| window == wanted);
    at.unwrap_or_else(|| panic!("the header has no string {text}")) + 8
}

/// Name of a damage, its change of the model, and the parts of the message.
type Damage<'a> = (&'a str, &'a dyn Fn(&mut Bytes, &Original), &'a [&'a str]);

/// Runs the binary on each damaged model, and fails with all unexpected results.
fn check(table: &[Damage<'_>]) {
    let dir = tempfile::tempdir().unwrap();
    let original = Original::new(dir.path());
    let path = dir.path().join(FILE);
    fs::write(&path, &original.bytes).unwrap();
    cli::run(&path, &[]).expect(0);
    let mut failures = Vec::new();
    for (name, damage, parts) in table {
        let mut bytes = Bytes(original.bytes.clone());
        damage(&mut bytes, &original);
        assert_ne!(bytes.0, original.bytes, "{name} changes nothing");
        fs::write(&path, &bytes.0).unwrap();
        let refused = cli::run(&path, &[]).is_refused(parts);
        failures.extend(refused.err().map(|error| format!("{name}: {error}")));
    }
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), table.len(), failures.join("\n"));
}

const FILE: &str = "damaged.gguf";
const FETCH: &str = "fetch";
const CANNOT: &str = "llama.cpp cannot load this model";

#[test]
fn truncated_files() {
    type End = fn(&Original) -> usize;
    let ends: [(&str, End); 10] = [
        ("inside the version", |_| 6),
        ("inside the counts", |_| 20),
        ("inside the keys", |o| 24 + (o.table - 24) / 2),
        ("between keys and tensors", |o| o.table),
        ("inside the tensor table", |o| (o.table + o.header_end) / 2),
        ("before the padding", |o| o.header_end),
        ("inside the padding", |o| (o.header_end + o.data) / 2),
        ("before the data", |o| o.data),
        ("inside ordinary weights", |o| o.ordinary),
        ("inside expert weights", |o| o.expert),
    ];
    let cuts = ends.map(|(name, end)| (name, move |b: &mut Bytes, o: &Original| b.0.truncate(end(o))));
    let mut table: Vec<Damage> = Vec::new();
    table.extend(cuts.iter().map(|(name, cut)| (*name, cut as _, &[FILE, "truncated", FETCH][..])));
    table.push(("inside the magic", &|b, _| b.0.truncate(2), &[FILE, "not a GGUF file", "check the path"]));
    check(&table);
}

#[test]
fn hostile_lengths_and_offsets() {
    const NORM: &str = "output_norm.weight";
    const EXPERTS: &str = "blk.0.ffn_up_exps.weight";
    let at_key = |b: &Bytes, key: &str| place_of_string(&b.0, key) + key.len();
    check(&[
        ("2^64 - 1 tensors", &|b, _| b.put_u64(8, u64::MAX), &[FILE, "number of tensors", FETCH]),
        ("2^64 - 1 keys", &|b, _| b.put_u64(16, u64::MAX), &[FILE, "number of keys", FETCH]),
        ("a key of 2^60 bytes", &|b, _| b.put_u64(24, 1 << 60), &[FILE, "key 0", FETCH]),
        (
            "a string of 2^40 bytes",
            &|b, _| b.put_u64(at_key(b, "general.architecture") + 4, 1 << 40),
            &[FILE, "general.architecture", FETCH],
        ),
        (
            "an array of 2^61 strings",
            &|b, _| b.put_u64(at_key(b, "tokenizer.ggml.tokens") + 8, 1 << 61),
            &[FILE, "tokenizer.ggml.tokens", FETCH],
        ),
        (
            "a value of an unknown type",
            &|b, _| b.put_u32(at_key(b, "llama.block_count"), 77),
            &[FILE, "llama.block_count", FETCH],
        ),
        ("five dimensions", &|b, _| b.put_u32(b.entry(NORM), 5), &[FILE, NORM, FETCH]),
        ("2^63 elements", &|b, _| b.dimension(NORM, 0, 1 << 63), &[FILE, NORM, FETCH]),
        ("a row of half a block", &|b, _| b.dimension(EXPERTS, 0, 48), &[FILE, EXPERTS, FETCH]),
        ("an offset behind the file", &|b, _| b.offset(EXPERTS, 3, 1 << 40), &[FILE, EXPERTS, FETCH]),
        ("an offset that overflows", &|b, _| b.offset(EXPERTS, 3, u64::MAX - 31), &[FILE, EXPERTS, FETCH]),
        ("an odd offset", &|b, _| b.offset(EXPERTS, 3, 33), &[FILE, EXPERTS, FETCH]),
        ("two tensors in one place", &|b, _| b.offset(EXPERTS, 3, 0), &[FILE, "overlap", FETCH]),
        ("an unknown tensor type", &|b, _| b.dtype(EXPERTS, 3, 77), &[FILE, EXPERTS, "77", "update"]),
        ("a removed tensor type", &|b, _| b.dtype(EXPERTS, 3, 4), &[FILE, EXPERTS, "type 4"]),
        ("one tensor twice", &|b, _| b.rename("blk.1.attn_q.weight", "blk.0.attn_q.weight"), &[FILE, "twice", FETCH]),
    ]);
}

/// The header is sound, its values are not: mostly llama.cpp refuses them, and the process must survive that.
#[test]
fn impossible_models() {
    fn set(key: &'static str, value: u32) -> impl Fn(&mut Bytes, &Original) {
        move |b, _| b.key(key, value)
    }
    let used = "llama.expert_used_count";
    check(&[
        (
            "an architecture llama.cpp does not know",
            &|b, _| b.rename("llama", "lxxma"),
            &[FILE, CANNOT, FETCH, "lxxma"],
        ),
        ("more experts used than there are", &set(used, 5), &[FILE, CANNOT, FETCH]),
        ("no expert used", &set(used, 0), &[FILE, CANNOT, FETCH]),
        ("2^32 - 1 experts used", &set(used, u32::MAX), &[FILE, CANNOT, FETCH]),
        ("fewer experts than the tensors have", &set("llama.expert_count", 3), &[FILE, "expert_count"]),
        ("no experts", &set("llama.expert_count", 0), &[FILE, "expert_count"]),
        ("no heads", &set("llama.attention.head_count", 0), &[FILE, CANNOT, FETCH]),
        ("heads that do not divide", &set("llama.attention.head_count", 7), &[FILE, CANNOT, FETCH]),
        ("2^31 heads", &set("llama.attention.head_count", 1 << 31), &[FILE, CANNOT, FETCH]),
        ("no KV heads", &set("llama.attention.head_count_kv", 0), &[FILE, CANNOT, FETCH]),
        ("no width", &set("llama.embedding_length", 0), &[FILE, CANNOT, FETCH]),
        ("a width of 2^30", &set("llama.embedding_length", 1 << 30), &[FILE, CANNOT, FETCH]),
        ("no layers", &set("llama.block_count", 0), &[FILE, CANNOT, FETCH]),
        ("100000 layers", &set("llama.block_count", 100_000), &[FILE, CANNOT, FETCH]),
        ("an FFN of 2^31", &set("llama.feed_forward_length", 1 << 31), &[FILE, CANNOT, FETCH]),
        ("heads of 2^20", &set("llama.attention.key_length", 1 << 20), &[FILE, CANNOT, FETCH]),
        (
            "a missing tensor",
            &|b, _| b.rename("output_norm.weight", "output_nork.weight"),
            &[FILE, CANNOT, FETCH, "output_norm"],
        ),
        (
            "missing experts",
            &|b, _| b.rename("blk.1.ffn_up_exps.weight", "blk.1.ffn_uq_exps.weight"),
            &[FILE, "ffn_up_exps", FETCH],
        ),
        ("one expert too many", &|b, _| b.dimension("blk.1.ffn_up_exps.weight", 2, 5), &[FILE, FETCH]),
        ("experts of the wrong shape", &|b, _| b.dimension("blk.1.ffn_up_exps.weight", 1, 32), &[FILE, FETCH]),
    ]);
}

/// DeepSeek V4's first layers take a token's experts from a table in the file, which kernels do not check.
#[test]
fn tables_of_experts_that_are_not_there() {
    const TABLE: &str = "blk.1.ffn_gate_tid2eid.weight";
    let dir = tempfile::tempdir().unwrap();
    let sound = fixture::write(dir.path(), &Spec { experts: 8, ..Spec::tiny("deepseek4") });
    cli::run(&sound, &[]).expect(0);
    let last = Gguf::open(&sound).unwrap().tensor(TABLE).unwrap().extent.end() as usize - 4;
    let sound = fs::read(&sound).unwrap();
    let path = dir.path().join(FILE);
    let refused = |damage: &dyn Fn(&mut Bytes), expected: &str, found: &str| {
        let mut bytes = Bytes(sound.clone());
        damage(&mut bytes);
        fs::write(&path, &bytes.0).unwrap();
        cli::run(&path, &[]).is_refused(&[FILE, TABLE, expected, found, FETCH]).unwrap();
    };
    for id in [8, i32::MAX, -1, i32::MIN] {
        refused(&|bytes| bytes.put_u32(last, id as u32), "expected 0 to 7", &format!("found {id},"));
    }
    refused(&|bytes| bytes.dtype(TABLE, 2, 0), "expected i32", "found f32,");
}

/// llama.cpp divides by these values, or by what it makes of them.
#[test]
fn headers_that_end_in_a_division_by_zero() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE);
    for (arch, key, value) in [
        ("qwen3next", "full_attention_interval", 0),
        ("deepseek4", "attention.output_group_count", 0),
        ("minimax-m3", "rope.dimension_count", 0),
        ("deepseek4", "hyper_connection.sinkhorn_iterations", i32::MAX as u32),
    ] {
        let sound = fixture::write(dir.path(), &Spec::tiny(arch));
        let key = format!("{arch}.{key}");
        let refused = [FILE, &key, &format!("is {value}, expected at"), FETCH];
        let mut bytes = Bytes(fs::read(&sound).unwrap());
        bytes.key(&key, value);
        fs::write(&path, &bytes.0).unwrap();
        cli::run(&path, &[]).is_refused(&refused).unwrap();
        let key = format!("{key}=int:{value}");
        cli::run(&sound, &["--override-kv", &key]).is_refused(&refused[1..3]).unwrap();
    }
    // A cache without layers: heads as wide as the indexer's, and no layer with an indexer.
    let tiny = Spec::tiny("deepseek4");
    for (spec, key, found) in [
        (Spec { embd: 512, heads: 4, ..tiny.clone() }, "deepseek4.attention.indexer.key_length", "is 128,"),
        (Spec { layers: 1, ..tiny }, "deepseek4.attention.compress_ratios", "has no 4"),
    ] {
        let path = fixture::write(dir.path(), &spec);
        cli::run(&path, &[]).is_refused(&["deepseek4.gguf", key, found]).unwrap();
    }
    let sound = fixture::write(dir.path(), &Spec::tiny("glm-dsa"));
    cli::run(&sound, &[]).expect(0);
}

#[test]
fn a_context_that_no_memory_holds() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = Bytes(Original::new(dir.path()).bytes);
    bytes.key("llama.context_length", u32::MAX);
    let path = dir.path().join(FILE);
    fs::write(&path, &bytes.0).unwrap();
    cli::run(&path, &["-c", &u32::MAX.to_string()]).is_refused(&["-c"]).unwrap();
    // By default it is as long as memory allows.
    cli::run(&path, &["-c", "0", "--mem-budget", "1GiB"]).expect(0);
}

#[test]
fn files_of_other_kinds_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let absent = fixture::no_such_file();
    let (device, reason) =
        if cfg!(windows) { ("NUL", "cannot open this model") } else { ("/dev/null", "not a regular file") };
    let table: &[(PathBuf, &[&str])] = &[
        (dir.path().to_owned(), &["is a directory", ".gguf"]),
        (dir.path().join("absent.gguf"), &["absent.gguf", &absent]),
        (file("empty.gguf", b""), &["empty.gguf", "empty", FETCH]),
        (file("text.gguf", b"The three laws of robotics"), &["text.gguf", "not a GGUF file", "check the path"]),
        (file("lfs.gguf", b"version https://git-lfs.github.com/spec/v1\n"), &["lfs.gguf", "git lfs pull"]),
        (file("zeros.gguf", &[0; 4096]), &["zeros.gguf", "not a GGUF file"]),
        (PathBuf::from(device), &[device, reason]),
    ];
    for (path, parts) in table {
        cli::run(path, &[]).is_refused(parts).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

#[test]
fn missing_and_foreign_shards_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = fixture::write(dir.path(), &Spec { shards: 3, ..spec() });
    let second = dir.path().join("llama-00002-of-00003.gguf");
    // Any shard opens the model.
    cli::run(&second, &[]).expect(0);

    let bytes = fs::read(&second).unwrap();
    fs::copy(dir.path().join("llama-00003-of-00003.gguf"), &second).unwrap();
    cli::run(&first, &[]).is_refused(&["llama-00002-of-00003.gguf", FETCH]).unwrap();
    fs::write(&second, &bytes[..bytes.len() / 2]).unwrap();
    cli::run(&first, &[]).is_refused(&["llama-00002-of-00003.gguf", "truncated", FETCH]).unwrap();
    fs::remove_file(&second).unwrap();
    cli::run(&first, &[]).is_refused(&["shard 2 of 3 is missing", "llama-00002-of-00003.gguf", FETCH]).unwrap();
}
