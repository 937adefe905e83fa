use std::collections::HashMap;
use std::ffi::OsString;

use super::*;
use crate::args::parse;
use hobbit::options::{
    CpuHelper, DeviceChoice, DeviceOptions, FlashAttn, KernelChoice, KvType, LowShare, LowSource, PrecisionMode,
    PrecisionOptions, SplitMode, TensorOverride,
};
use hobbit_core::cache::Allocation;
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::store::IoMode;

#[derive(Default)]
struct Fake {
    files: HashMap<PathBuf, Vec<u8>>,
    input: Option<&'static [u8]>,
}

impl Surroundings for Fake {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.files.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn demo_model(&self) -> Result<PathBuf, String> {
        Ok("demo.gguf".into())
    }

    fn grammar_of_schema(&self, schema: &str) -> Result<String> {
        Ok(format!("grammar of {schema}"))
    }

    fn shows_colour(&self) -> bool {
        true
    }

    fn has_input(&self) -> bool {
        self.input.is_some()
    }

    fn input(&self) -> io::Result<Vec<u8>> {
        Ok(self.input.unwrap_or_default().to_vec())
    }
}

fn with(files: &[(&str, &[u8])], words: &[&str]) -> Result<HiArgs> {
    let files = files.iter().map(|(path, bytes)| (PathBuf::from(path), bytes.to_vec())).collect();
    let (low, _) = parse(words.iter().map(OsString::from)).map_err(|error| anyhow::anyhow!(error.to_string()))?;
    HiArgs::new(low, &Fake { files, input: None })
}

/// With `input` piped in.
fn piped(input: &'static [u8], words: &[&str]) -> Result<HiArgs> {
    let (low, _) = parse(words.iter().map(OsString::from)).map_err(|error| anyhow::anyhow!(error.to_string()))?;
    HiArgs::new(low, &Fake { input: Some(input), ..Fake::default() })
}

fn prompt_of(hi: &HiArgs) -> Option<&str> {
    hi.prompt.as_ref().map(|prompt| std::str::from_utf8(&prompt.0).unwrap())
}

fn hi(words: &[&str]) -> HiArgs {
    with(&[], words).unwrap()
}

fn wrong(words: &[&str]) -> String {
    format!("{:#}", with(&[], words).unwrap_err())
}

#[test]
fn ubatches_are_chosen_where_that_is_asked_for() {
    let of = |words: &[&str]| (hi(words).chooses_ubatch, hi(words).session_options.n_ubatch);
    assert_eq!(of(&[]), (false, 512));
    assert_eq!(of(&["-ub", "auto"]), (true, 512));
    assert_eq!(of(&["-ub", "auto", "-ub", "64"]), (false, 64));
    for bad in ["0", "-1", "many", "4294967296"] {
        assert!(wrong(&["-ub", bad]).contains("--ubatch-size"), "{bad}");
    }
}

#[test]
fn kernels() {
    assert_eq!(hi(&[]).model_options.kernels, KernelChoice::Identical);
    assert_eq!(hi(&["--kernels", "fastest"]).model_options.kernels, KernelChoice::Fastest);
    for contradiction in [&["--deterministic"][..], &["--precision", "exact"]] {
        let words = [&["--kernels", "fastest"], contradiction].concat();
        assert!(wrong(&words).contains("'--kernels fastest' contradicts"), "{contradiction:?}");
    }
}

#[test]
fn defaults_are_llama_cpps() {
    let hi = hi(&["-m", "a.gguf"]);
    assert_eq!(hi.model, Path::new("a.gguf"));
    let measured = DeviceOptions { calibrate: true, ..DeviceOptions::default() };
    // A chat asks for the last token's logits only.
    let session = SessionOptions { n_outputs_max: 1, ..SessionOptions::default() };
    let expected = ModelOptions { device: measured, expects: session.clone(), ..ModelOptions::default() };
    assert_eq!(hi.model_options, expected);
    assert_eq!(hi.session_options, session);
    assert_eq!(hi.sampling, SamplingOptions::default());
    assert_eq!((hi.prompt, hi.predict, hi.conversation), (None, None, None));
    assert!(hi.display_prompt && hi.escape && hi.output.perf && hi.colour);
    assert_eq!(hi.output.verbosity, Verbosity { shown: 3, logged: 3 });
}

#[test]
fn every_group_arrives() {
    let hi = hi(&[
        "-m",
        "a.gguf",
        "-ngl",
        "all",
        "--mem-budget",
        "2GiB",
        "--expert-cache",
        "50%",
        "--io",
        "direct",
        "-c",
        "4096",
        "-b",
        "64",
        "-ub",
        "32",
        "-t",
        "3",
        "-tb",
        "5",
        "-fa",
        "off",
        "-ctk",
        "q8_0",
        "-ctv",
        "iq4_nl",
        "--no-warmup",
        "--context-shift",
        "--keep",
        "-1",
        "-nkvo",
        "--rope-scale",
        "4",
        "-s",
        "7",
        "--temp",
        "-1",
        "--top_k",
        "5",
        "--samplers",
        "top-k;temp",
        "--mirostat",
        "2",
        "-l",
        "5-inf",
        "--dry-sequence-breaker",
        "a",
        "--dry-sequence-breaker",
        "none",
        "--dry-sequence-breaker",
        "\\n",
        "-j",
        "{}",
        "--ignore-eos",
    ]); // one line per group
    let model = &hi.model_options;
    assert_eq!((model.n_gpu_layers, model.budget, model.io), (-2, Budget::Bytes(2 << 30), IoMode::Direct));
    assert_eq!(model.expert_cache, ExpertCache::Percent(50.0));
    let session = &hi.session_options;
    assert_eq!((session.n_ctx, session.n_batch, session.n_ubatch), (4096, 64, 32));
    assert_eq!((session.threads, session.threads_batch), (Some(3), Some(5)));
    assert_eq!((session.flash_attn, session.type_k, session.type_v), (FlashAttn::Off, KvType::Q8_0, KvType::Iq4Nl));
    assert_eq!((session.warmup, session.context_shift, session.n_keep), (false, true, -1));
    assert_eq!((session.kv_offload, session.rope.freq_scale), (false, 0.25));
    let sampling = &hi.sampling;
    assert_eq!((sampling.seed, sampling.temp, sampling.top_k), (7, 0.0, 5));
    assert_eq!(sampling.samplers, [SamplerKind::TopK, SamplerKind::Temperature]);
    assert_eq!((sampling.mirostat.version, sampling.ignore_eos), (2, true));
    assert_eq!(sampling.logit_bias, [(5, f32::NEG_INFINITY)]);
    assert_eq!(sampling.dry.sequence_breakers, ["\n"]);
    assert_eq!(sampling.grammar.as_deref(), Some("grammar of {}"));
}

#[test]
fn devices() {
    let device = |words: &[&str]| hi(words).model_options.device;
    assert_eq!(device(&[]), DeviceOptions { calibrate: true, ..DeviceOptions::default() });
    let all = device(&[
        "-dev",
        "RPC0,CUDA1",
        "-sm",
        "none",
        "-mg",
        "1",
        "-ts",
        "3,1/0.5",
        "--rpc",
        "a:1,b:2",
        "--rpc",
        "c:3",
        "-ncmoe",
        "5",
        "-ot",
        "attn_.*=x=CPU,output=RPC0[a]",
        "--device-cache",
        "6G",
        "--device_headroom",
        "12.5%",
        "--cpu-helper",
        "4",
        "--no-pinned",
    ]);
    let expected = DeviceOptions {
        devices: DeviceChoice::Named(vec!["RPC0".into(), "CUDA1".into()]),
        rpc: vec!["a:1".into(), "b:2".into(), "c:3".into()],
        split: SplitMode::None,
        main: 1,
        tensor_split: vec![3.0, 1.0, 0.5],
        n_cpu_moe: 5,
        override_tensors: vec![
            TensorOverride { pattern: r"attn_.*=x".into(), buffer_type: "CPU".into() },
            TensorOverride { pattern: "output".into(), buffer_type: "RPC0[a]".into() },
        ],
        cache: ExpertCache::Bytes(6 << 30),
        headroom: 12.5,
        cpu_helper: CpuHelper::Threads(4),
        pinned: false,
        calibrate: true,
    };
    assert_eq!(all, expected);
    assert_eq!(device(&["--device", "none"]).devices, DeviceChoice::None);
    assert_eq!(device(&["--split-mode=layer"]).split, SplitMode::Layer);
    assert_eq!(device(&["-cmoe"]).n_cpu_moe, u32::MAX);
    assert_eq!(device(&["-cmoe", "--no-cpu-moe", "-ncmoe", "2"]).n_cpu_moe, 2);
    assert_eq!(device(&["--device-cache", "25%"]).cache, ExpertCache::Percent(25.0));
    for (word, helper) in
        [("auto", CpuHelper::Auto), ("on", CpuHelper::On), ("off", CpuHelper::Off), ("0", CpuHelper::Off)]
    {
        assert_eq!(device(&["--cpu-helper", word]).cpu_helper, helper);
    }
    // The host's tier is the expert cache by another name; the last of either counts.
    let host = |words: &[&str]| hi(words).model_options.expert_cache;
    assert_eq!(host(&["--host-cache", "40%"]), ExpertCache::Percent(40.0));
    assert_eq!(host(&["--host-cache", "40%", "--expert-cache", "1G"]), ExpertCache::Bytes(1 << 30));
}

#[test]
fn dynamic_precision() {
    let options = hi(&["--low", "q2_k,down=Q3_K", "--low-dir", "cache", "--low-share", "20%"]).model_options;
    let directory = Some(PathBuf::from("cache"));
    assert_eq!(options.low, Some(LowSource::Quantise { types: "q2_k,down=q3_k".into(), directory }));
    assert_eq!((options.low_share, options.precision), (LowShare::Percent(20.0), PrecisionOptions::default()));
    let options = hi(&[
        "--low",
        "small.gguf",
        "--precision",
        "dynamic",
        "--t1",
        "0.5",
        "--t2",
        "0.5",
        "--prefill-low",
        "50%",
        "--renormalise",
        "--no-upgrade",
        "--deterministic",
    ])
    .model_options;
    assert_eq!(options.low, Some(LowSource::File("small.gguf".into())));
    let expected = PrecisionOptions {
        mode: Some(PrecisionMode::Dynamic),
        t1: Some(0.5),
        t2: Some(0.5),
        renormalise: true,
        prefill_low: Some(0.5),
        upgrade: false,
        deterministic: true,
    };
    assert_eq!(options.precision, expected);
    // No contradiction: the start-up line says that the source is not used.
    assert_eq!(hi(&["--low", "q2_k", "--precision", "exact"]).model_options.precision.mode, Some(PrecisionMode::Exact));
    // The last of a flag counts.
    assert_eq!(hi(&["--t1", "1", "--t1", "0.7", "--t2", "0.8"]).model_options.precision.t1, Some(0.7));
}

#[test]
fn what_a_profile_is_for() {
    let words = ["--profile", "a.json", "--slots", "shallow-first:2", "--policy", "hobbit"];
    let options = hi(&words).model_options;
    assert_eq!(options.profile.as_deref(), Some(Path::new("a.json")));
    assert_eq!(options.caching.slots, Allocation::ShallowFirst { layers: 2 });
    assert_eq!(options.caching.weights, None, "the profile's");
    let options = hi(&[&words[..], &["--policy-weights", "1,1,0,0", "--slots", "by-penalty"]].concat()).model_options;
    assert_eq!((options.caching.slots, options.caching.weights), (Allocation::ByPenalty, "1,1,0,0".parse().ok()));
    assert_eq!((hi(&[]).model_options.profile, hi(&[]).model_options.caching.slots), (None, Allocation::Even));
    assert!(wrong(&["--slots", "odd"]).contains("even, shallow-first, shallow-first:LAYERS, by-penalty"));
}

#[test]
fn contradictions_of_dynamic_precision_are_wrong_usage() {
    for (words, parts) in [
        (&["--precision", "exact", "--t1", "0.5"][..], &["'--t1 0.5'", "'--precision exact'"][..]),
        (&["--t2", "1", "--precision=exact"], &["'--t2 1'", "'--precision exact'"]),
        (&["--t1", "0.95", "--t2", "0.9"], &["'--t1 0.95' is above '--t2 0.9'"]),
        (&["--low-dir", "d"], &["'--low-dir'", "there is no --low;"]),
        (&["--low-dir", "d", "--low", "a.gguf"], &["'--low-dir'", "--low names the file a.gguf;"]),
    ] {
        let error = parse(words.iter().map(OsString::from)).unwrap_err();
        assert_eq!((error.exit_code(), error.kind()), (2, clap::error::ErrorKind::ArgumentConflict), "{words:?}");
        let message = error.to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{words:?}: {message}");
    }
}

#[test]
fn prompts() {
    let files: &[(&str, &[u8])] = &[("p", b"from\\n file\n\n"), ("b", b"raw\\n\n"), ("bad", b"ok\xff")];
    let prompt = |words: &[&str]| with(files, words).map(|hi| prompt_of(&hi).unwrap().to_owned());
    assert_eq!(prompt(&["-p", r"a\nb"]).unwrap(), "a\nb");
    assert_eq!(prompt(&["-p", r"a\nb", "--no-escape"]).unwrap(), r"a\nb");
    assert_eq!(prompt(&["-p", "-ngl"]).unwrap(), "-ngl");
    assert_eq!(prompt(&["-p", ""]).unwrap(), "");
    assert_eq!(prompt(&["-f", "p"]).unwrap(), "from\n file\n");
    assert_eq!(prompt(&["-bf", "b"]).unwrap(), "raw\\n\n");
    assert_eq!(prompt(&["-p", "x", "-f", "p"]).unwrap(), "from\n file\n");
    assert_eq!(prompt(&["-f", "p", "-p", "x"]).unwrap(), "x");
    for words in [&["-f", "bad"][..], &["-bf", "bad"], &["-p", r"ok\xff"]] {
        let prompt = with(files, words).unwrap().prompt.unwrap();
        assert_eq!(prompt.0, b"ok\xff", "llama.cpp takes any bytes: {words:?}");
        assert_eq!(format!("{prompt:?}"), "\"ok\u{FFFD}\"");
    }
    assert!(format!("{:#}", prompt(&["-f", "none"]).unwrap_err()).starts_with("none: cannot read this file: "));
    assert!(format!("{:#}", with(files, &["-r", r"\xff"]).unwrap_err()).starts_with("-r: "));
    let hi = with(files, &["-sysf", "p", "-r", r"\nUser:", "--in-prefix", r"\t"]).unwrap();
    assert_eq!(hi.system_prompt.as_deref(), Some("from\\n file\n"));
    assert_eq!((hi.stops, hi.affixes.prefix), (vec!["\nUser:".to_owned()], "\t".to_owned()));
}

#[test]
fn a_prompt_may_come_from_the_standard_input() {
    let prompt = |input, words: &[&str]| piped(input, words).map(|hi| prompt_of(&hi).map(str::to_owned));
    assert_eq!(prompt(b"a\\nb\n", &["-f", "-"]).unwrap().unwrap(), "a\nb");
    assert_eq!(prompt(b"a\\nb\n", &["-bf", "-"]).unwrap().unwrap(), "a\\nb\n");
    assert_eq!(prompt(b"ignored", &["-p", "x"]).unwrap().unwrap(), "x");
    assert!(format!("{:#}", prompt(b"", &["-f", "-"]).unwrap_err()).starts_with("-f -: the standard input is empty"));
    // Read when it is known that no conversation reads it; till then the demo has no text of its own.
    let demo = piped(b"piped", &["-n", "-1"]).unwrap();
    assert_eq!((demo.prompt, demo.predict, demo.demo_predict), (None, None, None));
    let demo = piped(b"piped", &[]).unwrap();
    assert_eq!((demo.prompt, demo.predict, demo.demo_predict), (None, None, Some(64)));
}

#[test]
fn the_demo_model_has_a_default_prompt_and_length() {
    let demo = hi(&[]);
    assert!(demo.is_demo && demo.model == Path::new("demo.gguf"));
    assert_eq!((prompt_of(&demo), demo.predict), (Some(demo::PROMPT), Some(64)));
    assert_eq!(hi(&["-n", "5"]).predict, Some(5));
    let asked = hi(&["-p", "x"]);
    assert_eq!((prompt_of(&asked), asked.predict), (Some("x"), None));
    assert_eq!(hi(&["-i"]).prompt, None);
    assert_eq!(hi(&["-cnv"]).prompt, None);
}

#[test]
fn lengths() {
    for (n, expected) in [("-1", None), ("-2", None), ("0", Some(0)), ("9", Some(9))] {
        assert_eq!(hi(&["-m", "a", "-n", n]).predict, expected);
    }
    assert!(!hi(&["-m", "a", "-n", "-2", "--context-shift"]).session_options.context_shift);
}

#[test]
fn conversation_or_completion() {
    for (words, without_template, with_template) in [
        (&[][..], false, true),
        (&["-cnv"], true, true),
        (&["-no-cnv"], false, false),
        (&["-i"], false, false),
        (&["-i", "-cnv"], true, true),
        (&["--in-prefix", "x"], false, false),
        (&["-cnv", "--in-suffix", "x"], false, false),
        (&["--chat-template", "chatml"], true, true),
    ] {
        let hi = hi(words);
        assert_eq!((hi.converses(false), hi.converses(true)), (without_template, with_template), "{words:?}");
    }
}

#[test]
fn verbosity() {
    for (words, shown, logged) in [
        (&["--quiet"][..], 1, 3),
        (&["--quiet", "-lv", "4"], 1, 4),
        (&["-v"], 5, 5),
        (&["-lv", "4"], 4, 4),
        (&["-v", "--log-disable"], 1, 5),
    ] {
        assert_eq!(hi(words).output.verbosity, Verbosity { shown, logged }, "{words:?}");
    }
    assert!(!hi(&["--color", "off"]).colour);
}

#[test]
fn wrong_usage() {
    for (words, part) in [
        (&["--samplers", "top_k;bogus"][..], "--samplers: unknown sampler 'bogus'"),
        (&["--sampling-seq", "kz"], "--sampling-seq: unknown sampler letter 'z'"),
        (&["--mem-budget", "many"], "--mem-budget <SIZE|auto>"),
        (&["--io", "mmap"], "unknown I/O mode"),
        (&["--low", "q9"], "--low <FILE.gguf|TYPES|auto>"),
        (&["--low", "q9"], "there is no such file"),
        (&["--low", "q9"], "unknown type 'q9' (known: "),
        (&["--low-share", "2G"], "unknown low share '2G'"),
        (&["-dev", "CUDA0,,CUDA1"], "unknown device 'CUDA0,,CUDA1'"),
        (&["-sm", "row"], "its slots hold whole matrices"),
        (&["-sm", "tensor"], "give layer or none"),
        (&["-sm", "columns"], "unknown split mode 'columns' (expected one of: none, layer)"),
        (&["-ts", "3,x"], "with commas between them"),
        (&["-mg", "-1"], "--main-gpu"),
        (&["-ncmoe", "-1"], "--n-cpu-moe"),
        (&["--device-cache", "101%"], "0% to 100%"),
        (&["--device-headroom", "200%"], "expected a number from 0% to 100%"),
        (&["--cpu-helper", "maybe"], "unknown CPU helper setting 'maybe'"),
        (&["-otd", "exps=CPU"], "'-otd' is a llama.cpp flag that hobbit does not have"),
        (&["--precision", "fast"], "unknown precision mode 'fast'"),
        (&["--t1", "1.5"], "expected a number from 0 to 1"),
        (&["--prefill-low", "101%"], "expected a number from 0% to 100%"),
        (&["-ctk", "q9"], "unknown KV cache type 'q9'"),
        (&["--temp", "nan"], "finite"),
        (&["-n", "x"], "--predict"),
        (&["-b", "0"], "0 is not in"),
        (&["stray"], "unexpected argument 'stray'"),
        (&["--modle", "x"], "'--model'"),
        (&["--grammar", "x", "-j", "{}"], "cannot be used with"),
    ] {
        let message = wrong(words);
        assert!(message.contains(part), "{words:?}: {message}");
    }
}
