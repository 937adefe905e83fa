//! Images and sound: embeddings and logits equal to those of llama.cpp's mtmd, in the library and in the programs;
//! hostile bytes.

use std::ffi::CString;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use ggml_sys::llama;
use hobbit::engine::{MediaPrompt, Projector, ProjectorNeeds};
use hobbit::options::{FlashAttn, ProjectorOptions, Repack};
use hobbit::{Budget, Model, ModelOptions, OpenError, SessionOptions};
use hobbit_core::plan::{ExpertCache, PlanError};
use hobbit_synth::{Projector as Kind, Spec};

use crate::fixture::cli::{CLI, cli, program};
use crate::fixture::compare::{ALL, QUARTER, options};
use crate::fixture::media::*;
use crate::fixture::{in_own_process, quiet_llama_cpp};

const TEXT: &str = "What is in <__media__> this? Answer at once.";

fn session_options() -> SessionOptions {
    let flash_attn = FlashAttn::Off;
    SessionOptions {
        n_ctx: 1024,
        n_batch: 256,
        n_ubatch: 256,
        threads: Some(1),
        flash_attn,
        ..SessionOptions::default()
    }
}

/// Logits after the text by llama.cpp and mtmd alone.
fn stock(files: &Files, bytes: &[u8]) -> Vec<f32> {
    quiet_llama_cpp();
    let own = session_options();
    let name = |path: &Path| CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    let (model_name, projector_name) = (name(&files.model), name(&files.projector.path));
    // SAFETY: every object is made here, checked for null, used while it lives and freed once.
    unsafe {
        let mut params = llama::llama_model_default_params();
        (params.use_extra_bufts, params.n_gpu_layers) = (false, 0);
        let model = llama::llama_model_load_from_file(model_name.as_ptr(), params);
        assert!(!model.is_null());
        let mut params = llama::llama_context_default_params();
        (params.n_ctx, params.n_batch, params.n_ubatch) = (own.n_ctx, own.n_batch, own.n_ubatch);
        (params.n_threads, params.n_threads_batch) = (1, 1);
        params.flash_attn_type = llama::LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.n_outputs_max = 0;
        let context = llama::llama_init_from_model(model, params);
        assert!(!context.is_null());
        let mut params = llama::mtmd_context_params_default();
        (params.use_gpu, params.n_threads, params.warmup) = (false, 1, false);
        let media = llama::mtmd_init_from_file(projector_name.as_ptr(), model, params);
        assert!(!media.is_null());
        let opt = llama::mtmd_helper_init_opt_default();
        let bitmap = llama::mtmd_helper_bitmap_init_from_buf(media, bytes.as_ptr(), bytes.len(), false, opt).bitmap;
        assert!(!bitmap.is_null());
        let chunks = llama::mtmd_input_chunks_init();
        let text = llama::mtmd_input_text {
            text: TEXT.as_ptr().cast(),
            text_len: TEXT.len(),
            add_special: true,
            parse_special: true,
        };
        let mut bitmaps = [bitmap.cast_const()];
        assert_eq!(llama::mtmd_tokenize(media, chunks, &raw const text, bitmaps.as_mut_ptr(), 1), 0);
        let mut n_past = 0;
        let n_batch = own.n_batch as i32;
        let code = llama::mtmd_helper_eval_chunks(media, context, chunks, 0, 0, n_batch, true, &raw mut n_past);
        assert_eq!(code, 0);
        let n_vocab = llama::llama_vocab_n_tokens(llama::llama_model_get_vocab(model)) as usize;
        let row = llama::llama_get_logits_ith(context, -1);
        let logits = std::slice::from_raw_parts(row, n_vocab).to_vec();
        llama::mtmd_input_chunks_free(chunks);
        llama::mtmd_bitmap_free(bitmap);
        llama::mtmd_free(media);
        llama::llama_free(context);
        llama::llama_model_free(model);
        logits
    }
}

/// The model, its session's options and projector, as the programs open them.
fn open(files: &Files, expert_cache: ExpertCache) -> (Model, hobbit::Session, Projector) {
    quiet_llama_cpp();
    let needs = ProjectorNeeds::of(&files.projector).unwrap();
    let base = ModelOptions { repack: Repack::Off, lent_bytes: needs.bytes, ..options(expert_cache) };
    let model = Model::open(&files.model, &base).unwrap();
    let session = model.session(&session_options()).unwrap();
    let projector = Projector::open(&model, &files.projector).unwrap();
    (model, session, projector)
}

fn prompt(projector: &Projector, bytes: &[u8]) -> MediaPrompt {
    let media = projector.read(bytes).unwrap();
    projector.prompt(TEXT.as_bytes(), MARKER, &[media], true).unwrap()
}

/// Logits after the text by hobbit, which begins at token `from`.
fn logits(session: &mut hobbit::Session, projector: &Projector, prompt: &MediaPrompt, from: usize) -> Vec<f32> {
    session.feed_prompt(projector, prompt, from, None).unwrap();
    assert_eq!(session.n_past(), prompt.tokens.len());
    let (at, chunk) = prompt.chunks.iter().last().unwrap();
    let n_last = prompt.tokens.len() - at.max(from) - if from <= at { chunk.n_positions() } else { 0 };
    session.logits(n_last - 1).unwrap().to_vec()
}

fn check(arch: &str, kind: Kind, bytes: &[u8]) {
    let files = files(arch, kind);
    let expected = stock(&files, bytes);
    assert!(expected.iter().all(|logit| logit.is_finite()));
    for cache in [ALL, QUARTER] {
        let (_model, mut session, projector) = open(&files, cache);
        let prompt = prompt(&projector, bytes);
        let found = logits(&mut session, &projector, &prompt, 0);
        assert!(found == expected, "{arch}: logits differ from mtmd's");
        // Back to the end of the image, and on from there.
        let (at, chunk) = prompt.chunks.iter().last().unwrap();
        let after = at + chunk.n_positions();
        assert_eq!(session.keep(after), after);
        assert!(logits(&mut session, &projector, &prompt, after) == expected, "{arch}: logits differ after a cut");
    }
}

#[test]
fn images_whose_tokens_see_each_other() {
    check("qwen3moe", Kind::Gemma3, &png(40, 30, None));
}

#[test]
fn images_at_positions_of_several_dimensions() {
    check("qwen3vlmoe", Kind::Qwen2vl, &png(130, 70, None));
    check("qwen3vlmoe", Kind::Qwen2vl, &jpeg());
    check("qwen3vlmoe", Kind::Qwen3vl, &png(130, 70, None));
    check("qwen3vlmoe", Kind::Qwen3vl, &jpeg());
}

/// A large image becomes tiles, which are encoded together.
#[test]
fn images_of_several_tiles() {
    check("qwen3moe", Kind::Internvl, &png(40, 30, None));
    check("qwen3moe", Kind::Internvl, &png(300, 200, None));
}

#[test]
fn sound() {
    check("qwen3moe", Kind::Qwen2a, &wav(None));
}

fn opened(files: &Files, checkpoints: u32) -> (Model, hobbit::Session, Projector) {
    quiet_llama_cpp();
    let base = ModelOptions { repack: Repack::Off, ..options(QUARTER) };
    let model = Model::open(&files.model, &base).unwrap();
    let session = model.session(&SessionOptions { checkpoints, ..session_options() }).unwrap();
    let projector = Projector::open(&model, &files.projector).unwrap();
    (model, session, projector)
}

/// A recurrent state holds an image as it does tokens, and goes back to a checkpoint before or behind it.
fn check_recurrent(arch: &str, kind: Kind, image: &[u8]) {
    let files = files(arch, kind);
    let (_model, mut session, projector) = opened(&files, 0);
    let whole = prompt(&projector, image);
    assert!(logits(&mut session, &projector, &whole, 0) == stock(&files, image), "{arch}: logits differ from mtmd's");
    drop(session);

    let (model, mut session, projector) = opened(&files, 8);
    let text = |turns: &[&str]| {
        let turn = |text: &&str| format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
        turns.iter().map(turn).collect::<String>()
    };
    let medium = projector.read(image).unwrap();
    let prompt = |turns: &[&str]| {
        let media = vec![medium.clone(); turns.iter().map(|turn| turn.matches(MARKER).count()).sum()];
        projector.prompt(text(turns).as_bytes(), MARKER, &media, true).unwrap()
    };
    let before = "Tell me what the people of the old world knew about the stars.";
    let first = prompt(&[before, "What is in <__media__> this? Answer at once."]);
    let (at, chunk) = first.chunks.iter().next().unwrap();
    let behind = at + chunk.n_positions();
    assert!(chunk.n_tokens() > chunk.n_positions(), "positions of several dimensions");
    let fed = |session: &mut hobbit::Session, prompt: &MediaPrompt, from: usize| {
        session.feed_prompt(&projector, prompt, from, None).unwrap();
        assert_eq!(session.n_past(), prompt.tokens.len());
        session.logits(1).unwrap().to_vec()
    };
    let expected = fed(&mut session, &first, 0);
    let n = first.tokens.len();
    // The same prompt again.
    assert_eq!(session.keep(n - 1), n - 2);
    assert!(fed(&mut session, &first, n - 2) == expected, "{arch}: behind the image");
    // Another answer to the message: back to its header, behind the image.
    let header = n - model.tokenize("<|im_start|>assistant\n", false, true).unwrap().len();
    assert_eq!(session.keep(n - 3), header);
    assert!(fed(&mut session, &first, header) == expected, "{arch}: from the answer's header");
    // Another message: back to its beginning, before the image.
    let message = prompt(&[before]).tokens.len();
    assert_eq!(session.keep(first.chunks.whole(behind - 1)), message);
    assert!(fed(&mut session, &first, message) == expected, "{arch}: from the image's message");
    // No checkpoint is inside of the image.
    assert!(session.sequences().checkpoints(0).iter().all(|own| own.n_tokens <= at || own.n_tokens > behind));
}

#[test]
fn recurrent_models_keep_images_in_their_state() {
    check_recurrent("qwen35moe", Kind::Qwen2vl, &png(130, 70, None));
    check_recurrent("qwen4exp", Kind::Qwen3vl, &png(130, 70, None));
    // 352 tokens, in two batches.
    check_recurrent("qwen4exp", Kind::Qwen3vl, &png(700, 500, None));
}

/// A process of its own: the resident set is measured.
#[test]
fn experts_lend_the_projector_their_memory() {
    if !in_own_process("media::experts_lend_the_projector_their_memory") {
        return;
    }
    quiet_llama_cpp();
    // 102 MiB of experts. The large image has 2,500 tokens, llama.cpp's warm-up 2,116.
    let spec = Spec { layers: 8, experts: 32, topk: 4, embd: 256, ff: 512, ..Spec::tiny("qwen3vlmoe") };
    let files = files_of(&spec, Kind::Qwen2vl);
    let (small, large) = (png(130, 70, None), png(1600, 1600, None));
    let lent_bytes = ProjectorNeeds::of(&files.projector).unwrap().bytes;
    let open = |budget: u64| {
        let budget = Budget::Bytes(budget);
        let expects = SessionOptions { n_ctx: 4096, ..session_options() };
        let options =
            ModelOptions { budget, lent_bytes, passthrough: false, expects: expects.clone(), ..Default::default() };
        let model = Model::open(&files.model, &options)?;
        let session = model.session(&expects)?;
        Ok((model, session))
    };
    // The process counts in its budget, and grows.
    let minimum = || match open(1 << 20) {
        Err(OpenError::Plan(PlanError::TooSmall { minimum, .. })) => minimum,
        _ => panic!("1 MiB is enough"),
    };
    let budget = minimum() + (40 << 20);
    let (model, mut session) = open(budget).unwrap();
    let all = model.host_cache_bytes();
    let projector = Projector::open(&model, &files.projector).unwrap();
    assert_eq!(model.host_cache_bytes(), all, "it is closed again");
    let read = |session: &mut hobbit::Session, image: &[u8]| {
        let encoder = projector.encoder().unwrap();
        let before = model.host_cache_bytes();
        assert!(before < all);
        let prompt = prompt(&projector, image);
        session.reset();
        let fed = session.feed_prompt(&projector, &prompt, 0, Some(encoder.clone()));
        let (at, chunk) = prompt.chunks.iter().next().unwrap();
        let last = prompt.tokens.len() - at - chunk.n_positions() - 1;
        let logits = fed.map(|()| session.logits(last).unwrap().to_vec());
        let during = model.host_cache_bytes();
        drop(encoder);
        assert_eq!(model.host_cache_bytes(), all, "experts have their memory back");
        (before, during, logits)
    };
    let (before, during, expected) = read(&mut session, &small);
    assert!(before < all / 2 && before == during, "{before} and {during} of {all}");
    assert_eq!(read(&mut session, &small).2.unwrap(), expected.unwrap());
    let (before, during, logits) = read(&mut session, &large);
    assert!(during < before, "a larger image takes more");
    logits.unwrap();
    // Experts come and go while another thread evaluates.
    let generated = |session: &mut hobbit::Session| -> Vec<Vec<f32>> {
        session.reset();
        let step = |at: i32| {
            session.feed(&[at * 7919 % 251]).unwrap();
            session.logits(0).unwrap().to_vec()
        };
        (0..48).map(step).collect()
    };
    let expected = generated(&mut session);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                drop(projector.encoder().unwrap());
            }
        });
        let found = generated(&mut session);
        is_done.store(true, Ordering::Relaxed);
        assert!(found == expected);
    });
    assert_eq!(model.host_cache_bytes(), all);
    // A size that the user sets meanwhile stays.
    let encoder = projector.encoder().unwrap();
    let half = model.set_host_cache(ExpertCache::Bytes(all / 2));
    assert!(half < all / 2);
    drop(encoder);
    let half = model.host_cache_bytes();
    assert!(half <= all / 2 && half > all / 3);
    let peak = session.stats().peak_rss_bytes;
    assert!(peak <= budget, "{peak} bytes resident, {budget} allowed");
    drop((session, projector, model));

    // The heap keeps up to 17 MiB of closed models, more or less at each opening. An image of 3,969 tokens takes 24 MiB
    // and more.
    let smallest = (0..64).find_map(|mib| open(minimum() + (mib << 20)).ok());
    let (model, mut session) = smallest.expect("a budget just above the minimum");
    let projector = Projector::open(&model, &files.projector).unwrap();
    let large = prompt(&projector, &png(2016, 2016, None));
    let error = session.feed_prompt(&projector, &large, 0, None).unwrap_err().to_string();
    assert!(error.contains("do not fit the memory budget") && error.contains("--image-max-tokens"), "{error}");
    session.reset();
    session.feed_prompt(&projector, &prompt(&projector, &small), 0, None).unwrap();
}

/// Reads images of many sizes and forms 40 MiB above the smallest budget. A process of its own: the resident set is
/// measured.
fn check_peak(kind: Kind, arch: &str) {
    quiet_llama_cpp();
    let spec = Spec { layers: 8, experts: 32, topk: 4, embd: 256, ff: 512, ..Spec::tiny(arch) };
    let files = files_of(&spec, kind);
    let lent_bytes = ProjectorNeeds::of(&files.projector).unwrap().bytes;
    let open = |budget: u64| {
        let budget = Budget::Bytes(budget);
        let expects = SessionOptions { n_ctx: 4096, ..session_options() };
        let options = ModelOptions {
            budget,
            lent_bytes,
            passthrough: false,
            expects: expects.clone(),
            ..ModelOptions::default()
        };
        let model = Model::open(&files.model, &options)?;
        let session = model.session(&expects)?;
        Ok((model, session))
    };
    let minimum = match open(1 << 20) {
        Err(OpenError::Plan(PlanError::TooSmall { minimum, .. })) => minimum,
        _ => panic!("1 MiB is enough"),
    };
    let budget = minimum + (40 << 20);
    let (model, mut session) = open(budget).unwrap();
    let all = model.host_cache_bytes();
    let projector = Projector::open(&model, &files.projector).unwrap();
    let forms: [PixelForm; 4] = [(8, 0, false), (8, 2, true), (16, 6, false), (16, 6, true)];
    let sizes =
        [(1, 1), (31, 6200), (640, 480), (82, 16_384), (16_384, 82), (1024, 16_384), (16_384, 1024), (4096, 4096)];
    for (size, form) in sizes.into_iter().flat_map(|size| forms.map(|form| (size, form))) {
        let read = projector.read(&black(size, form));
        let peak = session.stats().peak_rss_bytes;
        assert!(peak <= budget, "{size:?} {form:?}: {peak} bytes resident, {budget} allowed");
        if let Err(error) = read {
            let (message, n_pixels) = (error.to_string(), size.0 * size.1);
            assert!(message.contains("memory budget") && n_pixels > 1 << 20, "{size:?} {form:?}: {message}");
        }
        assert_eq!(model.host_cache_bytes(), all, "experts have their memory back");
    }
    for size in [(1, 1 << 24), (1 << 24, 1), (1, 201), (16_385, 100), (4097, 4096)] {
        let message = projector.read(&black(size, (8, 0, false))).unwrap_err().to_string();
        assert!(message.contains("on a side"), "{size:?}: {message}");
    }
    let image = prompt(&projector, &black((640, 480), forms[3]));
    session.feed_prompt(&projector, &image, 0, None).unwrap();
    let peak = session.stats().peak_rss_bytes;
    assert!(peak <= budget, "{peak} bytes resident, {budget} allowed");
}

#[test]
fn images_of_one_size_keep_to_the_memory_budget() {
    if in_own_process("media::images_of_one_size_keep_to_the_memory_budget") {
        check_peak(Kind::Gemma3, "qwen3moe");
    }
}

#[test]
fn images_of_any_size_keep_to_the_memory_budget() {
    if in_own_process("media::images_of_any_size_keep_to_the_memory_budget") {
        check_peak(Kind::Qwen2vl, "qwen3vlmoe");
    }
}

#[test]
fn images_of_tiles_keep_to_the_memory_budget() {
    if in_own_process("media::images_of_tiles_keep_to_the_memory_budget") {
        check_peak(Kind::Internvl, "qwen3moe");
    }
}

#[test]
fn equal_images_have_equal_placeholders_and_others_have_not() {
    let files = files("qwen3moe", Kind::Gemma3);
    let (_model, _session, projector) = open(&files, ALL);
    let of = |bytes: &[u8]| prompt(&projector, bytes).tokens;
    let (one, two) = (of(&png(40, 30, None)), of(&png(40, 31, None)));
    assert_eq!(one, of(&png(40, 30, None)));
    assert_eq!(one.len(), two.len());
    let placeholders = |tokens: &[i32]| tokens.iter().copied().filter(|token| *token < -1).collect::<Vec<_>>();
    let (one, two) = (placeholders(&one), placeholders(&two));
    assert!(one.len() == 4 && one.iter().all(|token| !two.contains(token)), "{one:?} {two:?}");
    let wrong = projector.prompt(b"no place", MARKER, &[projector.read(&jpeg()).unwrap()], true).unwrap_err();
    assert!(wrong.to_string().contains("0 places"), "{wrong}");
}

#[test]
fn hostile_images_are_refused() {
    let files = files("qwen3moe", Kind::Gemma3);
    let (_model, mut session, projector) = open(&files, ALL);
    let _encoder = projector.encoder().unwrap();
    for (at, (bytes, part)) in hostile().iter().enumerate() {
        let error = projector.read(bytes).expect_err(&format!("hostile image {at} was read")).to_string();
        assert!(error.contains(part), "{at}: {error}");
    }
    for image in [scanned(0xc0, 4), with_thumbnail()] {
        projector.read(&image).unwrap();
    }
    // Changed bytes may still be an image.
    for original in [png(24, 16, None), jpeg()] {
        for at in 0..original.len() {
            for value in [0, 0xff, original[at] ^ 0x10] {
                let mut bytes = original.clone();
                bytes[at] = value;
                let _ = projector.read(&bytes);
            }
        }
    }
    let refused = projector.read(&wav(None)).unwrap_err().to_string();
    assert!(refused.contains("sound"), "{refused}");
    let prompt = prompt(&projector, &jpeg());
    session.feed_prompt(&projector, &prompt, 0, None).unwrap();
}

#[test]
fn hostile_sound_is_refused() {
    let files = files("qwen3moe", Kind::Qwen2a);
    let (_model, _session, projector) = open(&files, ALL);
    let _encoder = projector.encoder().unwrap();
    // One sample of a byte in each second.
    let mut long = wav(None);
    long[24..28].copy_from_slice(&1u32.to_le_bytes());
    (long[32], long[34]) = (1, 8);
    let error = projector.read(&long).unwrap_err().to_string();
    assert!(error.contains("seconds of sound"), "{error}");
    let loud = |sample: f32| {
        let mut samples = vec![0.25; 1600];
        samples[800] = sample;
        projector.read(&wav_of(&samples)).map(drop).map_err(|error| error.to_string())
    };
    for sample in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38, -40_000.0] {
        assert!(loud(sample).unwrap_err().contains("a sample of"), "{sample}");
    }
    for sample in [1.0, -1.5, 32_767.0] {
        loud(sample).unwrap();
    }
    for at in 0..60 {
        for value in [0, 0xff, 0x80] {
            let mut bytes = wav(None);
            bytes[at] = value;
            let _ = projector.read(&bytes);
        }
    }
    assert!(projector.read(&wav(None)[..20]).is_err());
    assert!(projector.read(&jpeg()).is_err());
}

#[test]
fn projectors_that_do_not_fit_are_refused() {
    let files = files("qwen3moe", Kind::Gemma3);
    let (model, _session, _projector) = open(&files, ALL);
    let other = files.projector.path.with_file_name("other.gguf");
    let wanted = ProjectorOptions { path: other.clone(), ..files.projector.clone() };
    let message = |options: &ProjectorOptions| Projector::open(&model, options).err().expect("refused").to_string();
    assert!(message(&wanted).contains("other.gguf"), "there is no file yet");
    Kind::Gemma3.write(&other, 128, 7).unwrap();
    assert!(message(&wanted).contains("mismatch"), "{}", message(&wanted));
    // A model is no projector; neither is the beginning of one.
    assert!(!message(&ProjectorOptions { path: files.model.clone(), ..wanted.clone() }).is_empty());
    let whole = std::fs::read(&files.projector.path).unwrap();
    for n in [0, 3, 100, 1000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&other, &whole[..n]).unwrap();
        assert!(ProjectorNeeds::of(&wanted).is_err() || Projector::open(&model, &wanted).is_err(), "{n} bytes");
    }
}

#[test]
fn the_command_line_reads_images() {
    let files = files("qwen3moe", Kind::Gemma3);
    let (model, projector) = (files.model.to_str().unwrap(), files.projector.path.to_str().unwrap());
    let base = ["-m", model, "--mmproj", projector, "-t", "1", "-c", "512", "-n", "6", "--temp", "0"];
    let run = |more: &[&str], lines: &str| {
        let case = cli(&[&base[..], more].concat());
        std::fs::write(case.dir.path().join("a.png"), png(40, 30, None)).unwrap();
        std::fs::write(case.dir.path().join("b.jpg"), jpeg()).unwrap();
        std::fs::write(case.dir.path().join("bad.png"), &png(40, 30, None)[..60]).unwrap();
        case.type_in(lines)
    };
    let raw = ["-no-cnv", "--no-display-prompt", "-p"];
    let text = |image: &str| run(&[&raw[..], &["See", "--image", image]].concat(), "").expect(0).stdout;
    let (one, other) = (text("a.png"), text("b.jpg"));
    assert_ne!(one, other, "the text depends on the image");
    let placed = run(&[&raw[..], &["<__media__>See", "--image", "a.png"]].concat(), "").expect(0).stdout;
    assert_eq!(one, placed, "an image without a place comes first");
    run(&[&raw[..], &["See", "--image", "a.png,b.jpg"]].concat(), "").expect(0);
    run(&[&raw[..], &["See", "--image", "bad.png"]].concat(), "")
        .expect(1)
        .says(&["bad.png", "cannot read this image"]);
    let talk = ["-cnv", "--no-display-prompt"];
    let asked = run(&[&talk[..], &["-st", "-p", "See", "--image", "a.png"]].concat(), "").expect(0).stdout;
    let typed = run(&talk, "/image a.png\nSee\n").expect(0).stdout;
    assert_eq!(typed.trim_end(), asked.trim_end());
    run(&talk, "/image bad.png\n/image b.jpg\nSee\n/regen\nAnd now?\n").expect(1).says(&["bad.png"]);
    let mut without = program(CLI);
    let output = without.args(["-m", model, "--image", "a.png", "-p", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "--image needs --mmproj");
}
