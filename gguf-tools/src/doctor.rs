//! `gguf-tools doctor`: one page about this machine, this build and a model, for a bug report.

mod choice;
mod disk;
mod exact;
mod host;
mod page;
mod scrub;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use hobbit::engine::{LinkSpeed, backends, llama_cpp_version, system_info};
use hobbit::{DeviceInfo, DeviceKind};
use hobbit_common::demo;
use hobbit_common::exit::in_words;
use hobbit_core::forecast::Limit;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::Pack;
use hobbit_core::plan::MemoryLimits;
use serde::Serialize;

use crate::inspect::forecast;
use crate::shared::{Bar, JsonArgs, file_name, quiet_llama_cpp, size};
use choice::{Choice, Facts, Fit, Kind, Share, choose};
use disk::Disk;
use exact::{Exactness, Job};
use host::{Machine, Memory, Processor};
use scrub::Scrub;

/// Time for the whole page.
const TIME: Duration = Duration::from_secs(60);
/// Time of one measurement of the disk.
const READ_TIME: Duration = Duration::from_millis(400);
const READ_TIME_QUICK: Duration = Duration::from_millis(20);
/// Context of the forecast, if none is given.
const CTX: u32 = 4096;

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Model to advise on; of a split model, any shard. Without one only the machine is described
    file: Option<PathBuf>,
    /// Memory that the process may take: G, GB and GiB are 1024^3 bytes [default: what is available here]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    ram: Option<u64>,
    /// Context in tokens [default of the forecast: 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    ctx: Option<u32>,
    /// Measure the disk for a twentieth of the time
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    json: JsonArgs,
    /// The backends of the program that asks for this page
    #[arg(long, hide = true, value_delimiter = ',')]
    asked_by: Vec<String>,
    /// For the processes of this tool
    #[arg(long, hide = true)]
    job: Option<Job>,
    #[arg(long, hide = true, requires = "job")]
    on: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  gguf-tools doctor
      This machine: processor, memory, disk, devices, llama.cpp, and whether hobbit's logits are llama.cpp's.
  gguf-tools doctor model.gguf
      Also what of the model fits where, its expected speed, and the command to use.
  gguf-tools doctor model.gguf --ram 8GiB --json

It takes at most a minute and prints no paths: paste it into a bug report.";

/// A part of the page, or why it is missing.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Part<T> {
    Known(T),
    Unknown { not_measured: String },
}

impl<T> Part<T> {
    fn unknown(why: impl Into<String>) -> Self {
        Self::Unknown { not_measured: why.into() }
    }

    fn of(found: Option<T>, why: &str) -> Self {
        found.map_or_else(|| Self::unknown(why), Self::Known)
    }

    fn of_result(found: anyhow::Result<T>) -> Self {
        found.map_or_else(|error| Self::unknown(in_words(&error)), Self::Known)
    }

    fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Unknown { .. } => None,
        }
    }
}

/// The page; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Report {
    hobbit: String,
    system: String,
    llama_cpp: String,
    backends: Vec<String>,
    /// Backends of the program that asked for this page, if they are others.
    #[serde(skip_serializing_if = "Option::is_none")]
    other_backends: Option<Vec<String>>,
    processor: Processor,
    memory: Memory,
    disk: Part<Disk>,
    devices: Part<Vec<Device>>,
    /// On the CPU and on each device: the bundled demo model with a quarter of its experts against plain llama.cpp.
    exactness: Vec<Exactness>,
    model: Option<Advised>,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct Device {
    #[serde(flatten)]
    info: DeviceInfo,
    copies: Part<LinkSpeed>,
}

#[derive(Debug, Serialize)]
struct Advised {
    file: String,
    kind: Kind,
    tensor_bytes: u64,
    forecast: Part<forecast::Report>,
    choice: Choice,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    quiet_llama_cpp();
    if let Some(job) = args.job {
        return exact::work(job, args.file.as_deref(), args.on.as_deref());
    }
    let started = Instant::now();
    let model = args.file.as_deref().map(|path| Gguf::open(path).map(|gguf| (path, gguf))).transpose()?;
    let demo = demo::of_this_process(cfg!(feature = "dynamic-backends"));
    let demo = demo.and_then(|found| found.ok_or_else(|| "the bundled demo model is not here".to_owned()));
    let files = [args.file.clone(), demo.clone().ok(), std::env::current_exe().ok()];
    let directories = [std::env::current_dir().ok(), std::env::home_dir(), Some(std::env::temp_dir())];
    let scrub = Scrub::of(files.into_iter().flatten(), directories.into_iter().flatten());
    let report = Report::of(args, model, demo, started)?;
    // Lines are wrapped last: a path with a space could be cut otherwise.
    let words = match args.json.json {
        true => scrub.text(&(serde_json::to_string_pretty(&report)? + "\n")),
        false => page::wrapped(&scrub.text(&report.to_string())),
    };
    Ok(std::io::Write::write_all(&mut std::io::stdout(), words.as_bytes())?)
}

impl Report {
    fn of(
        args: &Args,
        model: Option<(&Path, Gguf)>,
        demo: Result<PathBuf, String>,
        started: Instant,
    ) -> anyhow::Result<Self> {
        // Wine shows the files of the Linux below it.
        let is_linux = cfg!(target_os = "linux");
        let read = |path: &Path| if is_linux { std::fs::read_to_string(path).ok() } else { None };
        let deadline = started + TIME;
        let bar = Bar::of_units("machine", 10)?;
        let machine = Machine::read();
        let usable = std::thread::available_parallelism().map_or(1, |n| n.get());
        let processor = Processor::of(&machine, &read, system_info(), usable);
        let memory = Memory::of(&machine, &read, &MemoryLimits::read());

        bar.stage("disk");
        let time = if args.quick { READ_TIME_QUICK } else { READ_TIME };
        let mut step = || bar.step(1);
        let disk = match (&model, &demo) {
            (Some((_, gguf)), _) => Disk::of(gguf, false, &read, time, &mut step),
            (None, Ok(demo)) => {
                let gguf = Gguf::open(demo).map_err(anyhow::Error::from);
                gguf.and_then(|gguf| Disk::of(&gguf, true, &read, time, &mut step))
            }
            (None, Err(why)) => Err(anyhow::anyhow!("{why}; give a model, whose disk is then measured")),
        };
        let disk = Part::of_result(disk);
        bar.stage("devices");
        bar.step(1)?;
        let found = hobbit::devices(&[]).context("asking for devices");
        let found = found.map(|all| all.into_iter().filter(|device| device.kind != DeviceKind::Cpu).collect());
        let with_copies = |info: DeviceInfo| Device { copies: exact::copies(&info.name, deadline), info };
        let devices = found.map(|all: Vec<DeviceInfo>| all.into_iter().map(with_copies).collect::<Vec<_>>());
        let devices = Part::of_result(devices);
        bar.stage("model");
        bar.step(1)?;
        let advised = model
            .as_ref()
            .map(|(path, gguf)| Advised::of(args, path, gguf, &memory, (disk.known(), slowest_link(devices.known()))));
        let advised = advised.transpose()?;
        bar.stage("exactness");
        bar.step(1)?;
        let takes_layers = |device: &&Device| device.info.kind != DeviceKind::Accelerator;
        let names = devices.known().into_iter().flatten().filter(takes_layers).map(|device| Some(&*device.info.name));
        let compare = |on: Option<&str>| match &demo {
            Ok(demo) => exact::compare(demo, on, deadline),
            Err(why) => Exactness { on: on.unwrap_or("CPU").to_owned(), outcome: Part::unknown(why) },
        };
        let exactness = std::iter::once(None).chain(names).map(compare).collect();
        bar.step(1)?;
        let container = host::container(&read).map_or(String::new(), |by| format!(", in a container ({by})"));
        let release = sysinfo::System::kernel_version().unwrap_or_default();
        Ok(Self {
            hobbit: env!("HOBBIT_VERSION").to_owned(),
            system: format!("{} {} {}{container}", std::env::consts::OS, release.trim(), std::env::consts::ARCH),
            // The published sources do not say it.
            llama_cpp: llama_cpp_version().replace(", commit unknown", " (its crate names no commit)"),
            other_backends: Some(args.asked_by.clone()).filter(|asked| !asked.is_empty() && *asked != backends()),
            backends: backends(),
            processor,
            memory,
            disk,
            devices,
            exactness,
            model: advised,
            seconds: started.elapsed().as_secs_f64(),
        })
    }
}

impl Advised {
    /// `link` in bytes per second, as measured.
    fn of(
        args: &Args,
        path: &Path,
        gguf: &Gguf,
        memory: &Memory,
        (disk, link): (Option<&Disk>, Option<f64>),
    ) -> anyhow::Result<Self> {
        let kind = match () {
            () if Pack::is_pack(gguf) => Kind::Pack,
            () if gguf.experts()?.is_empty() => Kind::Dense,
            () => Kind::Experts,
        };
        let room = args.ram.or(memory.budget.known().copied());
        let forecast = match kind {
            Kind::Pack => Part::unknown("forecasts are of plain models: name the one that the pack was made of"),
            Kind::Dense => Part::unknown("forecasts are of models with experts"),
            Kind::Experts => {
                let disk = disk.and_then(Disk::best);
                Part::of_result(forecast::here(gguf, args.ram, args.ctx.unwrap_or(CTX), (disk, link)))
            }
        };
        let tensor_bytes = gguf.tensor_bytes();
        let no_direct = disk.and_then(|disk| match [&disk.direct, &disk.io_uring] {
            [Part::Unknown { not_measured }, _] | [_, Part::Unknown { not_measured }] => Some(not_measured.clone()),
            _ => None,
        });
        let facts = Facts {
            file: file_name(path),
            kind,
            bytes: tensor_bytes,
            room,
            available: memory.budget.known().copied(),
            asked: args.ram,
            ctx: args.ctx,
            fit: fit(kind, tensor_bytes, room, &forecast),
            address_space: memory.ulimits.as_ref().and_then(|limits| limits.address_space),
            no_direct,
        };
        Ok(Self { choice: choose(&facts), file: facts.file, kind, tensor_bytes, forecast })
    }
}

/// The rate of pinned copies to the slowest GPU.
fn slowest_link(devices: Option<&Vec<Device>>) -> Option<f64> {
    let gpus = devices?.iter().filter(|device| device.info.kind == DeviceKind::Gpu && !device.info.unified);
    gpus.map(|device| device.copies.known()?.pinned).reduce(|a, b| Some(a?.min(b?)))?
}

/// How much of a model has room, by its forecast.
fn fit(kind: Kind, bytes: u64, room: Option<u64>, forecast: &Part<forecast::Report>) -> Fit {
    let report = match (kind, forecast) {
        // Its weights alone: the context and buffers come on top.
        (Kind::Dense, _) if room.is_some_and(|room| bytes < room) => return Fit::Memory,
        (_, Part::Unknown { not_measured }) => return Fit::Unknown(not_measured.clone()),
        (_, Part::Known(report)) => report,
    };
    let Some(forecast) = &report.forecast else {
        return Fit::Nothing(report.refused.clone().unwrap_or_default());
    };
    match (&forecast.plan, &forecast.device) {
        (None, _) => Fit::Memory,
        (_, Some(device)) if device.is_fully_resident => Fit::Device,
        (Some(plan), device) => Fit::Part(Share {
            experts: forecast.share.min(1.0),
            on_device: device.as_ref().map(|device| device.total.saturating_sub(device.headroom)),
            below_token: plan.warning.is_some(),
            reads_limit: forecast.expected.limit() == Limit::Disk && forecast.expected.bytes_read > 0.0,
        }),
    }
}
