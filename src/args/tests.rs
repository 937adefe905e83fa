//! Flags from typing to settings, as tables: what each gives, and what is refused.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::FromArgMatches;

use super::preset::PresetWords;
use super::{PrecisionArgs, command, parse};
use crate::args::{CacheState, Verbosity, grammar};
use crate::argv::{Note, Switch, Tri, negated_by_environment, normalise};
use crate::demo;
use crate::hub::{Source, Want};
use crate::reasoning::Reasoning;
use crate::resolve::HiArgs;
use crate::surroundings::Surroundings;
use hobbit::options::*;
use hobbit_core::cache::Allocation;
use hobbit_core::cache::policy::Weights;
use hobbit_core::plan::{Budget, ExpertCache, UBATCH_MAX};
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
    fn grammar_of_schema(&self, schema: &str) -> anyhow::Result<String> {
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

fn typed(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

fn settings(words: impl IntoIterator<Item = OsString>, around: &Fake) -> anyhow::Result<HiArgs> {
    let (low, _) = parse(words).map_err(|error| anyhow::anyhow!(error.to_string()))?;
    HiArgs::new(low, around)
}

fn hi(line: &str) -> HiArgs {
    settings(typed(line), &Fake::default()).unwrap()
}

fn prompt_of(hi: &HiArgs) -> Option<&str> {
    hi.input.prompt.as_ref().map(|prompt| std::str::from_utf8(&prompt.0).unwrap())
}

/// In clap's spelling.
fn normal(words: &[&str]) -> Vec<OsString> {
    normalise(words.iter().map(OsString::from), &grammar(&command())).unwrap().words
}

#[test]
fn defaults_are_llama_cpps() {
    let hi = hi("-m a.gguf");
    // A chat asks for the last token's logits only, and goes back to checkpoints, which a library's session does not.
    let session =
        SessionOptions { n_outputs_max: 1, checkpoints: 32, n_ubatch_max: UBATCH_MAX, ..SessionOptions::default() };
    let expected = ModelOptions { expects: session.clone(), ..ModelOptions::default() };
    assert_eq!((hi.run.model_options, hi.run.session_options), (expected, session));
    assert_eq!(hi.sampling, SamplingOptions::default());
    assert_eq!((hi.input.prompt, hi.input.predict, hi.chat.conversation), (None, None, None));
    assert!(hi.input.flags.display_prompt.0 && hi.input.flags.text.escape.0 && hi.output.closing.perf.0 && hi.colour);
    assert_eq!(hi.output.verbosity(), Verbosity { shown: 3, logged: 3 });
}

/// Paths of Windows are absolute with a drive.
#[cfg(windows)]
#[test]
fn the_cache_directory_is_the_users_on_windows() {
    let of = |set: &[(&str, &str)]| {
        let value = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        CacheState::Auto.directory(value)
    };
    let local = ("LOCALAPPDATA", "C:\\local");
    assert_eq!(of(&[local]), Some("C:\\local\\hobbit\\experts".into()));
    assert_eq!(of(&[local, ("XDG_CACHE_HOME", "D:\\x")]), Some("D:\\x\\hobbit\\experts".into()));
    assert_eq!(of(&[local, ("HOME", "D:\\h")]), Some("C:\\local\\hobbit\\experts".into()));
}

#[cfg(not(windows))]
#[test]
fn the_cache_directory_is_the_users() {
    let of = |word: &str, set: &'static [(&str, &str)]| {
        let value = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        CacheState::from(OsString::from(word)).directory(value)
    };
    assert_eq!(of("auto", &[("HOME", "/h")]), Some("/h/.cache/hobbit/experts".into()));
    assert_eq!(of("auto", &[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Some("/x/hobbit/experts".into()));
    assert_eq!(of("auto", &[("HOME", "/h"), ("XDG_CACHE_HOME", "x")]), Some("/h/.cache/hobbit/experts".into()));
    assert_eq!(of("auto", &[]), None);
    for word in ["off", "a.state"] {
        assert_eq!(of(word, &[("HOME", "/h")]), None, "{word}");
    }
}

type Holds = fn(&HiArgs) -> bool;

fn device(hi: &HiArgs) -> &DeviceOptions {
    &hi.run.model_options.device
}

const GIVEN: &[(&str, Holds)] = &[
    ("-m a.gguf", |hi| hi.run.model == Path::new("a.gguf") && !hi.run.is_demo),
    ("-ngl all", |hi| hi.run.model_options.n_gpu_layers == -2),
    ("--gpu-layers 7", |hi| hi.run.model_options.n_gpu_layers == 7),
    ("--mem-budget 2GiB", |hi| hi.run.model_options.budget == Budget::Bytes(2 << 30)),
    ("--expert-cache 50%", |hi| hi.run.model_options.expert_cache == ExpertCache::Percent(50.0)),
    ("--host-cache 40% --expert-cache 1G", |hi| hi.run.model_options.expert_cache == ExpertCache::Bytes(1 << 30)),
    ("--io direct", |hi| hi.run.model_options.io == IoMode::Direct),
    ("--mirror a --mirror b,c", |hi| hi.run.model_options.mirrors == ["a", "b,c"].map(std::path::PathBuf::from)),
    ("--cache-state a", |hi| hi.run.model_options.cache_state == Some("a".into())),
    ("--cache-state a --cache-state off", |hi| hi.run.model_options.cache_state.is_none()),
    ("--kernels fastest", |hi| hi.run.model_options.kernels == KernelChoice::Fastest),
    ("-c 4096 -b 64", |hi| (hi.run.session_options.n_ctx, hi.run.session_options.n_batch) == (4096, 64)),
    ("-ub 64 -ub 32", |hi| (hi.run.session_options.n_ubatch, hi.run.session_options.n_ubatch_max) == (32, 0)),
    ("-ub auto", |hi| (hi.run.session_options.n_ubatch, hi.run.session_options.n_ubatch_max) == (512, UBATCH_MAX)),
    ("-t 3 -tb 5", |hi| (hi.run.session_options.threads, hi.run.session_options.threads_batch) == (Some(3), Some(5))),
    ("-fa off", |hi| hi.run.session_options.flash_attn == FlashAttn::Off),
    ("-ctk q8_0", |hi| hi.run.session_options.type_k == KvType::Q8_0),
    ("-ctv iq4_nl", |hi| hi.run.session_options.type_v == KvType::Iq4Nl),
    ("-ctxcp 3 -cms 0", |hi| (hi.run.session_options.checkpoints, hi.run.session_options.checkpoint_step) == (3, 0)),
    ("--swa-checkpoints 0", |hi| hi.run.session_options.checkpoints == 0),
    ("--no-warmup", |hi| !hi.run.session_options.warmup),
    ("--no-warmup --warmup", |hi| hi.run.session_options.warmup),
    ("--context-shift --keep -1", |hi| hi.run.session_options.context_shift && hi.run.session_options.n_keep == -1),
    ("-n -2 --context-shift", |hi| !hi.run.session_options.context_shift && hi.input.predict.is_none()),
    ("-nkvo", |hi| !hi.run.session_options.kv_offload),
    ("--rope-scale 4", |hi| hi.run.session_options.rope.freq_scale == 0.25),
    ("-s 7", |hi| hi.sampling.seed == 7),
    ("-s -1", |hi| hi.sampling.seed == SamplingOptions::RANDOM_SEED),
    ("--temp -1 --top_k=5", |hi| (hi.sampling.temp, hi.sampling.top_k) == (0.0, 5)),
    ("--samplers top-k;temp", |hi| hi.sampling.samplers == [SamplerKind::TopK, SamplerKind::Temperature]),
    ("--mirostat 2", |hi| hi.sampling.mirostat.version == 2),
    ("-l 5-inf", |hi| hi.sampling.logit_bias == [(5, f32::NEG_INFINITY)]),
    ("-l 5+0.5 -l 6-1", |hi| hi.sampling.logit_bias == [(5, 0.5), (6, -1.0)]),
    (r"--dry-sequence-breaker a --dry-sequence-breaker none --dry-sequence-breaker \n", |hi| {
        hi.sampling.dry.sequence_breakers == ["\n"]
    }),
    ("-j {}", |hi| hi.sampling.grammar.as_deref() == Some("grammar of {}")),
    ("--ignore-eos", |hi| hi.sampling.ignore_eos),
    ("--n_predict 9", |hi| hi.input.predict == Some(9)),
    ("-m a -n -1", |hi| hi.input.predict.is_none()),
    ("-n 0", |hi| hi.input.predict == Some(0)),
    ("--spec-type ngram-cache,ngram-simple --draft 20", |hi| {
        let own = hi.speculation.as_ref().unwrap();
        let sources = [DraftSource::NgramCache, DraftSource::NgramSimple];
        (&own.sources[..], own.n_max, own.fixed) == (&sources, 15, false) && hi.run.session_options.n_outputs_max == 16
    }),
    ("-md d.gguf -cd 512 -devd none -ngld 3 --draft-fixed", |hi| {
        let own = hi.speculation.as_ref().unwrap();
        let draft = own.draft.as_ref().unwrap();
        own.fixed
            && own.sources == [DraftSource::DraftSimple]
            && (draft.n_ctx, draft.n_gpu_layers, &draft.devices) == (512, 3, &Some(DeviceChoice::None))
    }),
    ("-lcs a -lcd b", |hi| hi.speculation.as_ref().unwrap().sources == [DraftSource::NgramCache]),
    ("-md d.gguf --spec-type none", |hi| hi.speculation.is_none() && hi.run.session_options.n_outputs_max == 1),
    ("--spec-type ngram-mod --draft-max 0", |hi| hi.speculation.is_none()),
    ("-no-cnv -st", |hi| hi.chat.conversation == Some(Switch(false)) && hi.chat.single_turn.0),
    ("-e --no-escape", |hi| !hi.input.flags.text.escape.0),
    ("--no-perf --show-timings", |hi| hi.output.closing.perf.0),
    ("-dev RPC0,CUDA1", |hi| device(hi).devices == DeviceChoice::Named(vec!["RPC0".into(), "CUDA1".into()])),
    ("--device none", |hi| device(hi).devices == DeviceChoice::None),
    ("-sm none -mg 1", |hi| (device(hi).split, device(hi).main) == (SplitMode::None, 1)),
    ("-ts 3,1/0.5", |hi| device(hi).tensor_split == [3.0, 1.0, 0.5]),
    ("--rpc a:1,b:2 --rpc c:3", |hi| device(hi).rpc == ["a:1", "b:2", "c:3"]),
    ("-ncmoe 5", |hi| device(hi).n_cpu_moe == 5),
    ("-cmoe", |hi| device(hi).n_cpu_moe == u32::MAX),
    ("-cmoe --no-cpu-moe -ncmoe 2", |hi| device(hi).n_cpu_moe == 2),
    ("--no-op-offload", |hi| !device(hi).op_offload),
    ("-ncmoe 2", |hi| device(hi).op_offload),
    ("-ot attn_.*=x=CPU,output=RPC0[a]", |hi| {
        let overrides = &device(hi).override_tensors;
        overrides[0].pattern == "attn_.*=x" && overrides[1].buffer_type == "RPC0[a]"
    }),
    ("--device-cache 6G", |hi| device(hi).cache == ExpertCache::Bytes(6 << 30)),
    ("--device_headroom 12.5%", |hi| device(hi).headroom == 12.5),
    ("--cpu-helper 4 --no-pinned", |hi| device(hi).cpu_helper == CpuHelper::Threads(4) && !device(hi).pinned),
    ("--unified on", |hi| device(hi).unified == UnifiedMemory::On),
    ("--cpu-helper 0", |hi| device(hi).cpu_helper == CpuHelper::Off),
    ("--low q2_k,down=Q3_K --low-dir d", |hi| {
        let expected = LowSource::Quantise { types: "q2_k,down=q3_k".into(), directory: Some("d".into()) };
        hi.run.model_options.low == Some(expected)
    }),
    ("--low dir/Small.GGUF", |hi| hi.run.model_options.low == Some(LowSource::File("dir/Small.GGUF".into()))),
    ("--low_share 20%", |hi| hi.run.model_options.low_share == LowShare::Percent(20.0)),
    ("--low q2_k --precision exact", |hi| hi.run.model_options.precision.mode == Some(PrecisionMode::Exact)),
    ("--low auto --precision exact", |hi| hi.run.model_options.low.is_none()),
    ("--t1 1 --t1 0.7 --t2=0.8", |hi| hi.run.model_options.precision.t1 == Some(0.7)),
    ("--prefill-low 50% --renormalise --no-upgrade --deterministic", |hi| {
        let precision = &hi.run.model_options.precision;
        precision.prefill_low == Some(0.5) && precision.renormalise && !precision.upgrade && precision.deterministic
    }),
    ("--slots shallow-first:2 --policy hobbit", |hi| {
        hi.run.model_options.caching.slots == Allocation::ShallowFirst { layers: 2 }
            && hi.run.model_options.caching.weights == Weights::default()
    }),
    ("--policy-weights 1,1,0,0 --expert-slots even", |hi| {
        hi.run.model_options.caching.slots == Allocation::Even && hi.run.model_options.caching.weights.lfu == 0.5
    }),
    ("--predictor path-table --path-table a", |hi| hi.run.model_options.path_table == Some("a".into())),
    ("--target-latency 50 --substitute 0.3 --route-prompts", |hi| {
        hi.run.model_options.routing.target_latency.is_some_and(|time| time.as_secs_f64() == 0.05)
    }),
    ("--target-latency 50 --cache-bias 0.2", |hi| hi.run.model_options.routing.cache_bias == 0.2),
    ("--substitute auto", |hi| {
        let routing = &hi.run.model_options.routing;
        routing.substitute == RoutingOptions::ALPHA && routing.spares_flat
    }),
    ("--substitute 0.3", |hi| !hi.run.model_options.routing.spares_flat),
    ("--virtual-experts p.json", |hi| {
        hi.run.model_options.routing.virtual_experts == VirtualExperts::Plan("p.json".into())
    }),
    ("--control-vector-layer-range 2 -1", |hi| {
        hi.run.model_options.adapters.control_layers == Some((2, i32::MAX as u32))
    }),
    ("--quiet -lv 4", |hi| hi.output.verbosity() == Verbosity { shown: 1, logged: 4 }),
    ("-v --log-disable", |hi| hi.output.verbosity() == Verbosity { shown: 1, logged: 5 }),
    ("-v", |hi| hi.output.verbosity() == Verbosity { shown: 5, logged: 5 }),
    ("--color off", |hi| !hi.colour),
    ("-mm p.gguf --image a.png,b.png --audio c.wav --image-max-tokens 64 -t 3", |hi| {
        let projector = hi.projector.as_ref().unwrap();
        hi.input.attached == ["a.png", "b.png", "c.wav"].map(PathBuf::from)
            && (projector.path.as_path(), projector.image_max_tokens) == (Path::new("p.gguf"), 64)
            && projector.threads == 3
    }),
    ("--no-log-jsonl --no-mmap --prio 2 -n 3", |hi| hi.input.predict == Some(3)),
];

#[test]
fn each_flag_arrives() {
    for (line, holds) in GIVEN {
        assert!(holds(&hi(line)), "{line}");
    }
}

const REFUSED: &[(&str, &str)] = &[
    ("--samplers top_k;bogus", "--samplers: unknown sampler 'bogus'"),
    ("--sampling-seq kz", "--sampling-seq: unknown sampler letter 'z'"),
    ("--mem-budget many", "--mem-budget <SIZE|auto>"),
    ("--io mmap", "unknown I/O mode"),
    ("--low q9", "--low <FILE.gguf|TYPES|auto>"),
    (
        "--low q9",
        "there is no such file, and these are no types such as q2_k or q2_k,down=q3_k either: unknown type 'q9'",
    ),
    ("--low q2_k,out=q3_k", "unknown slice 'out'"),
    ("--low q2_k,down=q3_k,down=q4_k", "each slice at most once"),
    ("--low-share 2G", "unknown low share '2G'"),
    ("-dev CUDA0,,CUDA1", "unknown device 'CUDA0,,CUDA1'"),
    ("-sm row", "row split is not supported: hobbit keeps an expert whole on one device"),
    ("-sm tensor", "give layer or none"),
    ("-sm columns", "unknown split mode 'columns' (expected one of: none, layer)"),
    ("-ts 3,x", "with commas between them"),
    ("-ts 1,nan", "with commas between them"),
    ("-mg -1", "--main-gpu"),
    ("-ncmoe -1", "--n-cpu-moe"),
    ("--device-cache 101%", "0% to 100%"),
    ("--device-headroom 200%", "expected a number from 0% to 100%"),
    ("--cpu-helper maybe", "unknown CPU helper setting 'maybe'"),
    ("-otd exps=CPU", "'-otd' is a flag of llama.cpp or ik_llama.cpp that hobbit does not have"),
    ("-hfd a/b", "give the draft model's file: -md FILE"),
    ("--spec-type lookup", "unknown type of speculative decoding 'lookup'"),
    ("--draft-p-min 2", "expected a number from 0 to 1"),
    ("--video x.mp4", "'--video' is a flag of llama.cpp or ik_llama.cpp that hobbit does not have: "),
    ("--path x", "the server serves its own page and no files"),
    ("--tools all", "the server runs no tools"),
    ("m.gguf", "give -m m.gguf"),
    ("--mmproj x.gguf --prompt-cache y", "leave it out with --mmproj"),
    ("--precision fast", "unknown precision mode 'fast'"),
    ("--t1 1.5", "expected a number from 0 to 1"),
    ("--t1 nan", "expected a number from 0 to 1"),
    ("--prefill-low 101%", "expected a number from 0% to 100%"),
    ("-ctk q9", "unknown KV cache type 'q9'"),
    ("-ub 0", "--ubatch-size"),
    ("-ub many", "--ubatch-size"),
    ("--temp nan", "finite"),
    ("--dry-base 0.5", "at least 1"),
    ("-s -2", "-1"),
    ("-l 5", "TOKEN_ID+BIAS"),
    ("-l 5+nan", "TOKEN_ID+BIAS"),
    ("-n x", "--predict"),
    ("-b 0", "0 is not in"),
    ("-t 513", "expected a number up to 512"),
    ("run qwen3", "unexpected argument 'run': there are no subcommands; hobbit-cli -hf USER/REPO downloads and chats"),
    ("--temp 0 stray", "unexpected argument 'stray'"),
    ("--modle x", "'--model'"),
    ("-m", "a value is required for '--model <FNAME>'"),
    ("--list-devices=x", "unexpected value 'x' for '--list-devices'"),
    ("--no-warmup=on", "unexpected argument '--no-warmup'"),
    ("-ngl=99", "unknown flag '-ngl=99'; write '-ngl 99'"),
    ("-n64", "unknown flag '-n64'; write '-n 64'"),
    ("-t1", "unknown flag '-t1'; did you mean '-t 1' or '--t1'?"),
    ("-temp 1", "unknown flag '-temp'; did you mean '--temp'?"),
    ("-é", "unknown flag '-é'"),
    ("--grammar x -j {}", "cannot be used with"),
    ("--slots odd", "even, shallow-first, shallow-first:LAYERS"),
    ("--control-vector-layer-range 2", "expected two numbers"),
    ("--control-vector-layer-range 7 2", "layer 7 is behind layer 2"),
    ("--path-table a.paths", "--predictor path-table, found none"),
    ("--precision exact --t1 0.5", "'--t1 0.5' contradicts '--precision exact'"),
    ("--t2 1 --precision=exact", "'--t2 1' contradicts '--precision exact'"),
    ("--t1 0.95 --t2 0.9", "'--t1 0.95' is above '--t2 0.9'"),
    ("--low-dir d", "there is no --low;"),
    ("--low-dir d --low a.gguf", "--low names the file a.gguf;"),
    ("--kernels fastest --deterministic", "'--kernels fastest' contradicts '--deterministic'"),
    ("--kernels fastest --precision exact", "'--kernels fastest' contradicts '--precision exact'"),
    ("--substitute -1", "such as 0.3, auto or off"),
    ("--target-latency 0", "milliseconds above 0"),
    ("--target-latency nan", "milliseconds above 0"),
    ("--target-latency 50 --cache-bias 0.5", "above 0.3"),
    ("--target-latency 50 --deterministic", "cannot be had with --deterministic"),
    ("--target-latency 50 --virtual-experts auto", "cannot be had with --virtual-experts"),
    ("--target-latency 50 --precision exact", "'--target-latency' contradicts '--precision exact'"),
    ("--cache-bias 0.2 --precision exact", "'--cache-bias 0.2' contradicts '--precision exact'"),
    ("--route-prompts", "of no use"),
    ("--max-loss 1% --t1 0.5", "'--max-loss 1%' cannot be had with --cache-bias"),
    ("--max-loss 1% --precision exact", "'--max-loss 1%' cannot be had with --precision exact"),
    ("-m m.gguf -hf a/b", "cannot be used with"),
    ("-hf a/b -mu http://h/m.gguf", "cannot be used with"),
    ("-hff c.gguf", "give -hf USER/REPO"),
    ("-hf a", "-hf: 'a' is no repository"),
    ("--chat-template-kwargs [1]", "expected a JSON object"),
];

#[test]
fn each_mistake_is_named() {
    for (line, part) in REFUSED {
        let error = format!("{:#}", settings(typed(line), &Fake::default()).unwrap_err());
        assert!(error.contains(part), "{line}: {error}");
    }
    let error = parse(typed("--t1 0.95 --t2 0.9")).unwrap_err();
    assert_eq!((error.exit_code(), error.kind()), (2, clap::error::ErrorKind::ArgumentConflict));
}

#[test]
fn sources_of_models() {
    let source = |line: &str| parse(typed(line)).unwrap().0.run.model.source.source().unwrap();
    let repo = |want| Some(Source::Repo { id: "a/b".parse().unwrap(), want });
    for line in ["-hf a/b:Q8_0", "-hfr a/b:Q8_0", "--hf_repo=a/b:Q8_0"] {
        assert_eq!(source(line), repo(Want::Quant("Q8_0".into())), "{line}");
    }
    assert_eq!(source("-hf a/b -hff c.gguf"), repo(Want::File("c.gguf".into())));
    assert_eq!(source("-mu http://h/m.gguf"), Some(Source::Url("http://h/m.gguf".into())));
    assert_eq!(source("-m m.gguf --offline"), None);
    // An unused token is not checked, because it may come from the environment; it is never shown.
    let (low, _) = parse(["-hft", "hf secret"].map(OsString::from)).unwrap();
    assert!(!format!("{low:?}").contains("secret"));
}

#[test]
fn values_are_never_rewritten() {
    for value in ["-ngl", "--help", "--no-warmup", "", "-", "--", "a_b", "x=--y_z", "--offline"] {
        assert_eq!(normal(&["-p", value, "-st"]), [&format!("--prompt={value}"), "--single-turn=on"]);
    }
    assert_eq!(normal(&["-fa", "off", "-i"]), ["--flash-attn=off", "--interactive=on"]);
    assert_eq!(normal(&["-fa", "-i"]), ["--flash-attn", "--interactive=on"]);
    assert_eq!(normal(&["--color", "-1", "--color"]), ["--color=-1", "--color"]);
    assert_eq!(parse(typed("--color")).unwrap().0.output.color, Tri::On, "clap's default for a bare flag");
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStringExt;
        let path = OsString::from_vec(b"\xff.gguf".to_vec());
        let line = normalise(["-m".into(), path], &grammar(&command())).unwrap();
        assert_eq!(line.words, [OsString::from_vec(b"--model=\xff.gguf".to_vec())]);
    }
}

#[test]
fn switches_and_their_environment() {
    assert_eq!(("enabled".parse(), "0".parse()), (Ok(Switch(true)), Ok(Switch(false))));
    assert_eq!(("-1".parse(), "on".parse()), (Ok(Tri::Auto), Ok(Tri::On)));
    assert!("yes".parse::<Switch>().is_err());
    for (line, expected) in [
        ("", Repack::Auto),
        ("--repack", Repack::On),
        ("--repack ordinary", Repack::Ordinary),
        ("-nr", Repack::Off),
        ("--repack=0", Repack::Off),
    ] {
        assert_eq!(parse(typed(line)).unwrap().0.run.model.repack, expected, "{line}");
    }
    for (variable, word) in [("LLAMA_ARG_NO_KV_OFFLOAD", "--kv-offload=off"), ("LLAMA_ARG_NO_REPACK", "--repack=off")] {
        assert_eq!(negated_by_environment(&command(), |name| name == variable), [word]);
    }
}

#[test]
fn the_environment_yields_to_typed_flags() {
    let check = |line: &str, from_environment: &str| {
        // clap reads the process's environment, which tests share: pass the source of each value instead.
        let words = typed(&format!("hobbit-cli {line} {from_environment}"));
        let matches = command().try_get_matches_from(words).unwrap();
        let is_typed = |id: &str| line.contains(&format!("--{}=", id.replace('_', "-")));
        PrecisionArgs::from_arg_matches(&matches).unwrap().check(is_typed)
    };
    assert!(check("--precision=exact", "--t1=0.5 --t2=0.2").is_ok());
    assert!(check("--deterministic=on", "--kernels=fastest").is_ok() && check("", "--low-dir=d").is_ok());
    let exact = check("--precision=exact --t2=0.5", "--t1=0.5").unwrap_err();
    assert!(exact.starts_with("'--t2 0.5' contradicts '--precision exact'"), "{exact}");
    assert!(check("--t1=0.5", "--t2=0.2").unwrap_err().starts_with("'--t1 0.5' is above '--t2 0.2'"));
}

#[test]
fn prompts() {
    let files = [("p", &b"from\\n file\n\n"[..]), ("b", b"raw\\n\n"), ("bad", b"ok\xff")];
    let files = || files.iter().map(|(path, bytes)| (PathBuf::from(path), bytes.to_vec())).collect();
    let with = |line: &str| settings(typed(line), &Fake { files: files(), input: None });
    for (line, expected) in [
        (r"-p a\nb", "a\nb"),
        (r"-p a\nb --no-escape", r"a\nb"),
        ("-p -ngl", "-ngl"),
        ("-f p", "from\n file\n"),
        ("-bf b", "raw\\n\n"),
        ("-p x -f p", "from\n file\n"),
        ("-f p -p x", "x"),
    ] {
        assert_eq!(prompt_of(&with(line).unwrap()), Some(expected), "{line}");
    }
    for line in ["-f bad", "-bf bad", r"-p ok\xff"] {
        assert_eq!(with(line).unwrap().input.prompt.unwrap().0, b"ok\xff", "llama.cpp takes any bytes: {line}");
    }
    assert!(format!("{:#}", with("-f none").unwrap_err()).starts_with("none: cannot read this file: "));
    assert!(format!("{:#}", with(r"-r \xff").unwrap_err()).starts_with("-r: "));
    let hi = with(r"-sysf p -r \nUser: --in-prefix \t").unwrap();
    assert_eq!(hi.chat.system_prompt.as_deref(), Some("from\\n file\n"));
    assert_eq!((hi.input.stops, hi.input.affixes.prefix), (vec!["\nUser:".to_owned()], "\t".to_owned()));
}

#[test]
fn a_mark_before_a_text_is_no_part_of_it() {
    let files = || HashMap::from([(PathBuf::from("f"), "\u{feff}{}\n".as_bytes().to_vec())]);
    let with = |line: &str| settings(typed(line), &Fake { files: files(), input: None }).unwrap();
    assert_eq!(with("-jf f").sampling.grammar.as_deref(), Some("grammar of {}\n"));
    assert_eq!(with("--grammar-file f").sampling.grammar.as_deref(), Some("{}\n"));
    assert_eq!(prompt_of(&with("-f f")), Some("{}"));
    assert_eq!(prompt_of(&with("-bf f")), Some("\u{feff}{}\n"));
    let chat = with("-sysf f --chat-template-file f").chat;
    assert_eq!((chat.system_prompt.as_deref(), chat.template.chat_template.as_deref()), (Some("{}"), Some("{}\n")));
}

#[test]
fn standard_input_and_the_demo() {
    let piped = |input, line: &str| settings(typed(line), &Fake { input: Some(input), ..Fake::default() });
    assert_eq!(prompt_of(&piped(b"a\\nb\n", "-f -").unwrap()), Some("a\nb"));
    assert_eq!(prompt_of(&piped(b"a\\nb\n", "-bf -").unwrap()), Some("a\\nb\n"));
    assert_eq!(prompt_of(&piped(b"ignored", "-p x").unwrap()), Some("x"));
    assert!(format!("{:#}", piped(b"", "-f -").unwrap_err()).starts_with("-f -: the standard input is empty"));
    // Piped text is read later, once no conversation reads it; till then the demo has no text of its own.
    let demo = piped(b"piped", "").unwrap();
    assert_eq!((demo.input.prompt, demo.input.predict, demo.input.demo_predict), (None, None, Some(64)));
    let demo = hi("");
    assert!(demo.run.is_demo && demo.run.model == Path::new("demo.gguf"));
    assert_eq!((prompt_of(&demo), demo.input.predict), (Some(demo::PROMPT), Some(64)));
    assert_eq!((prompt_of(&hi("-p x")), hi("-p x").input.predict), (Some("x"), None));
    assert_eq!((hi("-i").input.prompt, hi("-cnv").input.prompt), (None, None));
}

#[test]
fn conversation_or_completion() {
    for (line, without_template, with_template) in [
        ("", false, true),
        ("-cnv", true, true),
        ("-no-cnv", false, false),
        ("-i", false, false),
        ("-i -cnv", true, true),
        ("--in-prefix x", false, false),
        ("-cnv --in-suffix x", false, false),
        ("--chat-template chatml", true, true),
    ] {
        let hi = hi(line);
        assert_eq!((hi.converses(false), hi.converses(true)), (without_template, with_template), "{line}");
    }
}

#[test]
fn reasoning_becomes_template_variables() {
    let reasoning = |words: &[&str]| Reasoning::new(parse(words.iter().map(OsString::from)).unwrap().0.reasoning);
    let given = r#"--chat-template-kwargs={"reasoning_effort": "low", "preserve_reasoning": false, "x": 1}"#;
    for (words, variables) in [
        (&[][..], &["preserve_reasoning=true"][..]),
        (&[given], &["preserve_reasoning=false", "reasoning_effort=\"low\"", "x=1"]),
        (&[given, "--reasoning-effort=high"], &["preserve_reasoning=false", "reasoning_effort=\"high\"", "x=1"]),
        (&[given, "--reasoning-effort=default"], &["preserve_reasoning=false", "x=1"]),
        (&["--reasoning=off"], &["enable_thinking=false", "preserve_reasoning=true"]),
    ] {
        let found = reasoning(words).template_kwargs;
        let found: Vec<String> = found.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(found, variables, "{words:?}");
    }
    let off = reasoning(&["--reasoning-budget=0", "--reasoning-budget-message=So:"]);
    assert_eq!((off.sampled().tokens, off.budget_message.as_str()), (Some(0), "So:"));
    assert_eq!(reasoning(&["--reasoning-budget=-1"]).budget, None);
    for (word, template_thinks, expected) in
        [("auto", true, true), ("auto", false, false), ("on", false, true), ("off", true, false)]
    {
        let reasoning = reasoning(&[&format!("--reasoning={word}")]);
        assert_eq!(reasoning.enable_thinking(&reasoning.template_kwargs, template_thinks).ok(), Some(expected));
    }
    let text = [("enable_thinking".to_owned(), "\"no\"".to_owned())].into();
    assert!(reasoning(&[]).enable_thinking(&text, true).is_err());
}

fn preset(line: &str, variables: &[(&str, &str)]) -> PresetWords {
    let variable = |name: &str| Some(variables.iter().find(|(known, _)| *known == name)?.1.into());
    PresetWords::of(&typed(line), &command(), variable)
}

#[test]
fn presets_set_flags_that_are_not_given() {
    let note = |line: &str| preset(line, &[]).note().map_or_else(String::new, |note| note.to_string());
    let budget = "--prefetch-distance 1 --prefetch budget --cpu-helper";
    for (name, flags) in [
        (
            "hobbit",
            "--policy hobbit --expert-slots even --predictor stacked-gate --prefetch-distance 2 --prefetch all \
             --no-overlap --cpu-helper off --low auto --low-share 10% --t1 0.6 --t2 0.9 --prefill-low 0% --no-upgrade"
                .to_owned(),
        ),
        (
            "edgemoe",
            "--policy edgemoe --expert-slots even --predictor path-table --prefetch-distance 1 --prefetch top-3 \
             --cpu-helper off --precision exact"
                .to_owned(),
        ),
        (
            "fate",
            format!(
                "--policy arc --expert-slots shallow-first:3 --predictor cross-layer {budget} off --low auto \
                 --low-share 0% --t1 1 --t2 1 --prefill-low 25% --no-upgrade"
            ),
        ),
        (
            "smoe",
            format!(
                "--policy smoe --expert-slots even --predictor stacked-gate {budget} auto --substitute 0.3 --keep-top 0"
            ),
        ),
        (
            "swapmoe",
            "--policy learned --expert-slots even --predictor none --prefetch-distance 1 --prefetch off --cpu-helper \
             off --virtual-experts auto"
                .to_owned(),
        ),
    ] {
        assert_eq!(note(&format!("--preset={name}")), format!("preset {name}: {flags}"));
        let words = preset(&format!("--preset={name}"), &[]).words;
        command().try_get_matches_from([&["hobbit-cli".into()], &words[..]].concat()).unwrap();
    }
    assert_eq!(note("--preset=none"), "");
    let given = note("--policy=lru --low=q3_k --overlap=on --preset=hobbit");
    assert!(given.starts_with("preset hobbit: --expert-slots even") && given.contains("--t1 0.6"), "{given}");
    assert!(!given.contains("--low auto") && !given.contains("overlap"), "{given}");
    assert!(note("--precision=exact --preset=hobbit").ends_with("--no-overlap --cpu-helper off"));
    // A typed preset overrides variables; variables override a preset that is one itself.
    let policy = ("HOBBIT_ARG_POLICY", "lru");
    assert!(preset("--preset=fate", &[policy]).words.contains(&"--policy=arc".into()));
    let words = preset("", &[policy, ("HOBBIT_ARG_PRESET", "fate")]).words;
    assert!(!words.contains(&"--policy=arc".into()) && words.contains(&"--predictor=cross-layer".into()));
}

#[test]
fn flags_without_effect_are_noted() {
    let (_, notes) = parse(typed("--prio 2")).unwrap();
    assert!(matches!(&notes[..], [Note::NoEffect { flag, .. }] if flag == "--prio"), "{notes:?}");
}

#[test]
fn a_loss_bound_needs_measurements() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("a.gguf");
    let error = super::bounded(ModelOptions::default(), &model, 0.01).unwrap_err().to_string();
    for part in ["--max-loss 1%", "a.profile.json", "gguf-tools profile", "37 runs"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn commands_of_gguf_tools_are_named() {
    let refused = |words: &[&str]| normalise(words.iter().map(OsString::from), &grammar(&command())).unwrap_err();
    for tool in ["pull", "list", "rm", "inspect", "verify"] {
        let told = refused(&[tool, "a/b"]).to_string();
        assert_eq!(told, format!("'{tool}' is a command of gguf-tools: gguf-tools {tool} --help explains it"));
    }
    // As a value it is none.
    assert_eq!(normal(&["-p", "list"]), ["--prompt=list"]);
}
