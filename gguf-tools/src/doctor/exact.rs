//! hobbit's logits against plain llama.cpp's, on the CPU and on each device; and copies to devices.
//!
//! Each engine runs in a process of its own: ggml knows hobbit's device once a model was opened, and a device that
//! fails may end the process.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use hobbit::engine::{LinkSpeed, Stock, StockOptions, link_speed};
use hobbit::options::{DeviceChoice, DeviceOptions, Repack};
use hobbit::{Model, ModelOptions, SessionOptions, Token};
use hobbit_core::plan::ExpertCache;
use serde::Serialize;

use super::Part;

/// Evaluated: the first tokens as a prompt, the others one by one.
const TEXT: &str = "In the beginning God created the heaven and the earth. And the earth was without form, and void; \
                    and darkness was upon the face of the deep. And the Spirit of God moved upon the face of the \
                    waters.";
const PROMPT_TOKENS: usize = 16;
const TOKENS: usize = 32;
/// hobbit's part of the experts, on the host and on a device.
const CACHE: ExpertCache = ExpertCache::Percent(25.0);
/// Time of a process, if the page's own leaves so much.
const PROCESS_TIME: Duration = Duration::from_secs(30);
/// Measured copies.
const COPY_TIME: Duration = Duration::from_millis(300);

/// The task of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Job {
    /// Logits of plain llama.cpp.
    LlamaCpp,
    /// hobbit's logits.
    Hobbit,
    /// Copies to a device.
    Copies,
}

impl Job {
    fn word(self) -> &'static str {
        match self {
            Self::LlamaCpp => "llama-cpp",
            Self::Hobbit => "hobbit",
            Self::Copies => "copies",
        }
    }
}

/// The comparison on the CPU or on a device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exactness {
    /// `CPU`, or ggml's name of the device.
    pub on: String,
    pub outcome: Part<Comparison>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Comparison {
    pub evaluations: usize,
    /// Evaluations with logits that are infinite or not numbers.
    pub broken: usize,
    /// Evaluations whose logits have the same bits.
    pub equal: usize,
    /// Evaluations with the same most probable token.
    pub same_token: usize,
    /// Kullback-Leibler divergence of hobbit's predictions from llama.cpp's, in the evaluations that are not broken.
    pub kl_mean: f64,
    pub kl_max: f64,
}

impl Comparison {
    /// Compares the logits of `n_vocab` tokens, evaluation by evaluation.
    fn of(theirs: &[f32], ours: &[f32], n_vocab: usize) -> Self {
        let pairs = || theirs.chunks(n_vocab).zip(ours.chunks(n_vocab));
        let is_finite = |(a, b): &(&[f32], &[f32])| a.iter().chain(*b).all(|logit| logit.is_finite());
        let kl: Vec<f64> = pairs().filter(is_finite).map(|(theirs, ours)| divergence(theirs, ours)).collect();
        let evaluations = pairs().count();
        let is_equal = |(a, b): &(&[f32], &[f32])| a.iter().zip(*b).all(|(a, b)| a.to_bits() == b.to_bits());
        Self {
            evaluations,
            broken: evaluations - kl.len(),
            equal: pairs().filter(is_equal).count(),
            same_token: pairs().filter(|(theirs, ours)| best(theirs) == best(ours)).count(),
            kl_mean: kl.iter().sum::<f64>() / kl.len().max(1) as f64,
            kl_max: kl.iter().copied().fold(0.0, f64::max),
        }
    }
}

fn best(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
}

fn divergence(from: &[f32], to: &[f32]) -> f64 {
    let (from, to) = (log_softmax(from), log_softmax(to));
    from.iter().zip(&to).map(|(p, q)| p.exp() * (p - q)).sum::<f64>().max(0.0)
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
    logits.iter().map(|logit| f64::from(logit - most) - sum.ln()).collect()
}

/// Compares the two on `device`, or on the CPU.
pub fn compare(model: &Path, device: Option<&str>, deadline: Instant) -> Exactness {
    let compared = || -> Result<Comparison> {
        let logits = |job| logits(&ask(job, Some(model), device, deadline)?);
        let ((n_vocab, theirs), (n_ours, ours)) = (logits(Job::LlamaCpp)?, logits(Job::Hobbit)?);
        ensure!(n_vocab == n_ours && theirs.len() == ours.len(), "the two evaluated different tokens");
        Ok(Comparison::of(&theirs, &ours, n_vocab))
    };
    Exactness { on: device.unwrap_or("CPU").to_owned(), outcome: Part::of_result(compared()) }
}

/// Measures copies to a device.
pub fn copies(device: &str, deadline: Instant) -> Part<LinkSpeed> {
    let measured =
        || -> Result<LinkSpeed> { Ok(serde_json::from_slice(&ask(Job::Copies, None, Some(device), deadline)?)?) };
    Part::of_result(measured())
}

/// The output of a process that does `job`.
fn ask(job: Job, model: Option<&Path>, device: Option<&str>, deadline: Instant) -> Result<Vec<u8>> {
    let left = deadline.saturating_duration_since(Instant::now());
    ensure!(left > Duration::from_secs(1), "the time for this page is over");
    let mut command = Command::new(std::env::current_exe().context("finding this program's file")?);
    command.args(["doctor", "--job", job.word()]).args(device.iter().flat_map(|name| ["--on", *name])).args(model);
    let (mut out, mut errors) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(errors.try_clone()?)
        .spawn()
        .context("starting")?;
    let until = Instant::now() + left.min(PROCESS_TIME);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > until || hobbit_common::signals::came() {
            child.kill()?;
            child.wait()?;
            hobbit_common::signals::check()?;
            let seconds = left.min(PROCESS_TIME).as_secs();
            bail!("{} took longer than {seconds} s; run it again when the machine is idle", job.word());
        }
        thread::sleep(Duration::from_millis(5));
    };
    let text = |file: &mut File| -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    if !status.success() {
        let errors = String::from_utf8_lossy(&text(&mut errors)?).into_owned();
        let last = errors.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("without a message");
        bail!("{} failed ({status}): {}", job.word(), last.trim().trim_start_matches("error: "));
    }
    text(&mut out)
}

/// The number of the vocabulary's tokens, and the logits, of a process's output.
fn logits(bytes: &[u8]) -> Result<(usize, Vec<f32>)> {
    let mut words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    let n_vocab = words.next().context("no logits")? as usize;
    let logits: Vec<f32> = words.map(f32::from_bits).collect();
    ensure!(n_vocab > 0 && !logits.is_empty() && logits.len().is_multiple_of(n_vocab), "incomplete logits");
    Ok((n_vocab, logits))
}

/// Does a job in this process, and writes the result to stdout.
pub fn work(job: Job, model: Option<&Path>, device: Option<&str>) -> Result<()> {
    if job == Job::Copies {
        let speed = link_speed(device.context("copies need a device")?, COPY_TIME).map_err(anyhow::Error::msg)?;
        return Ok(serde_json::to_writer(io::stdout(), &speed)?);
    }
    let model = model.context("give a model")?;
    let devices = match device {
        Some(name) => DeviceChoice::Named(vec![name.to_owned()]),
        None => DeviceChoice::None,
    };
    // One thread waits for no other, however busy the machine is.
    let session = SessionOptions { n_ctx: 256, threads: Some(1), ..SessionOptions::default() };
    let mut bytes = Vec::new();
    let mut keep = |logits: Option<&[f32]>| -> Result<()> {
        let logits = logits.context("an evaluation has no logits")?;
        bytes.extend(logits.iter().flat_map(|logit| logit.to_le_bytes()));
        Ok(())
    };
    let pieces = |tokens: Vec<Token>| -> Result<Vec<Vec<Token>>> {
        ensure!(tokens.len() >= TOKENS, "the text has too few tokens");
        let (prompt, singles) = tokens[..TOKENS].split_at(PROMPT_TOKENS);
        Ok(std::iter::once(prompt.to_vec()).chain(singles.iter().map(|token| vec![*token])).collect())
    };
    let n_vocab = if job == Job::LlamaCpp {
        let options = StockOptions {
            device: DeviceOptions { devices, ..DeviceOptions::default() },
            n_gpu_layers: -1,
            load_mode: None,
            repack: Repack::Off,
            routes: None,
            adapters: hobbit::options::AdapterOptions::default(),
        };
        let mut stock = Stock::open(model, &options, &session)?;
        for piece in pieces(stock.tokenize(TEXT)?)? {
            stock.feed(&piece)?;
            keep(stock.logits())?;
        }
        stock.n_vocab()
    } else {
        let options = ModelOptions {
            device: DeviceOptions { devices, cache: CACHE, ..DeviceOptions::default() },
            expert_cache: CACHE,
            repack: Repack::Off,
            passthrough: false,
            ..ModelOptions::default()
        };
        let model = Model::open(model, &options)?;
        let mut session = model.session(&session)?;
        for piece in pieces(model.tokenize(TEXT, false, false)?)? {
            session.feed(&piece)?;
            keep(session.logits(piece.len() - 1))?;
        }
        model.n_vocab()
    };
    let mut out = io::stdout().lock();
    out.write_all(&u32::try_from(n_vocab)?.to_le_bytes())?;
    out.write_all(&bytes)?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_bits_and_divergences_are_counted() {
        let theirs = [0.0f32, 1.0, 2.0, 0.5, 0.25, 0.0];
        let equal = Comparison::of(&theirs, &theirs, 3);
        assert_eq!(equal, Comparison { evaluations: 2, broken: 0, equal: 2, same_token: 2, kl_mean: 0.0, kl_max: 0.0 });
        let ours = [0.0f32, 1.0, 2.0, 0.5, 0.75, 0.0];
        let differ = Comparison::of(&theirs, &ours, 3);
        assert_eq!((differ.evaluations, differ.equal, differ.same_token), (2, 1, 1));
        assert!(differ.kl_max > 0.0 && (differ.kl_mean - differ.kl_max / 2.0).abs() < 1e-12, "{differ:?}");
        let broken = Comparison::of(&theirs, &[0.0, 1.0, 2.0, f32::NAN, f32::NAN, f32::NAN], 3);
        assert_eq!((broken.evaluations, broken.broken, broken.equal), (2, 1, 1));
        // Logits with the same differences predict the same.
        let shifted: Vec<f32> = theirs.iter().map(|logit| logit + 4.0).collect();
        assert!(Comparison::of(&theirs, &shifted, 3).kl_max < 1e-12);
    }

    #[test]
    fn incomplete_logits_are_refused() {
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(logits(&words(&[2, 0, 0x3f80_0000])).unwrap(), (2, vec![0.0, 1.0]));
        for bad in [&[][..], &[2], &[2, 1], &[0, 1]] {
            assert!(logits(&words(bad)).is_err(), "{bad:?}");
        }
    }
}
