//! `gguf-tools inspect --forecast`: predicts a model's speed before the model is downloaded.

mod machine;
mod page;
mod published;

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::bail;
use clap::builder::RangedI64ValueParser;
use hobbit_core::forecast::{
    Cpu, Expectation, Forecast, ForecastError, Host, Shape, Speed, Task, expected_speed, forecast,
};
use hobbit_core::gguf::{GgmlType, Gguf};
use hobbit_core::pack::Pack;
use hobbit_core::plan::{Holds, PlanError};
use hobbit_core::units::{GIB, MIB};
use hobbit_synth::{self as synth, Format, Spec, presets};
use serde::Serialize;

use crate::shared::{JsonArgs, size};
use machine::{Auto, Gpu, Machine, Origin, Rate};
pub use page::{Short, rate};

/// Memory sizes to compare, in GiB.
const SIZES_GIB: [u64; 20] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];
/// Maximum rows of that table.
const ROWS_MAX: usize = 8;

fn count() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=1 << 24)
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Forecast")]
pub struct Args {
    /// How fast it will run: of a file, of the first megabytes of one, or of a --shape
    #[arg(long)]
    pub forecast: bool,
    /// A known model instead of a file
    #[arg(long, value_name = "NAME", requires = "forecast", conflicts_with = "file",
        value_parser = clap::builder::PossibleValuesParser::new(presets()))]
    pub shape: Option<String>,
    /// Type of the shape's experts and other matrices [default: as it is published, or as Q4_K_M]
    #[arg(long = "type", value_name = "TYPE", requires = "shape")]
    dtype: Option<Format>,
    /// Memory that the process may take: G, GB and GiB are 1024^3 bytes [default: what is available here]
    #[arg(long, value_name = "SIZE", requires = "forecast", value_parser = size)]
    ram: Option<u64>,
    /// Disk: bytes per second of random reads of 1 MiB and more (3GB/s are 3 * 10^9 bytes, 3GiB/s 3 * 1024^3), or its
    /// connection (PCIe3, PCIe4, PCIe5, SATA), or 'auto': measured if the whole file is here, else 3 GB/s
    #[arg(long, value_name = "RATE", requires = "forecast", default_value = "auto",
        value_parser = machine::parse_disk)]
    disk: Auto<Rate>,
    /// Processor: bytes per second that all cores read of memory, or the memory's name and channels (DDR5-5600x2), and,
    /// if it is known, operations per second of large products (60GB/s,800GFLOP/s), or 'auto': measured here
    #[arg(long, value_name = "RATE", requires = "forecast", default_value = "auto",
        value_parser = machine::parse_cpu)]
    cpu: Auto<(Rate, Option<f64>)>,
    /// GPU: its name (RTX4090; an unknown one lists all), or memory, bandwidth and, if it is known, the link's rate
    /// (24GiB@1TB/s,32GB/s), 'none', or 'auto': this machine's, if this build can use it
    #[arg(long, value_name = "NAME|SIZE@RATE", requires = "forecast", default_value = "auto",
        value_parser = machine::parse_gpu)]
    gpu: Auto<Gpu>,
    /// Context in tokens
    #[arg(long, value_name = "N", requires = "forecast", default_value = "4096", value_parser = count())]
    ctx: u32,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", requires = "forecast", default_value = "512", value_parser = count())]
    prompt: u32,
}

/// The complete forecast; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Report {
    model: Model,
    machine: Machine,
    task: Task,
    /// Source of the hit rates.
    locality: String,
    pub forecast: Option<Forecast>,
    /// Reason why there is no forecast.
    pub refused: Option<String>,
    /// Forecasts for other memory sizes, all else equal.
    memory: Vec<Row>,
    /// On a busy machine: forecasts with published rates instead of those measured, the memory size equal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    published: Vec<Published>,
}

#[derive(Debug, Serialize)]
struct Model {
    name: String,
    architecture: String,
    n_parameters: u64,
    n_parameters_used: u64,
    tensor_bytes: u64,
    expert_bytes: u64,
    n_layers: usize,
    n_expert: u16,
    n_expert_used: u32,
    /// Bytes of one expert, in the first layer with experts.
    one_expert_bytes: u64,
    /// Bytes of weights that one token uses.
    token_bytes: u64,
    kv_bytes_per_token: u64,
    /// For an incomplete file: bytes present, and bytes missing.
    partial: Option<(u64, u64)>,
}

#[derive(Debug, Serialize)]
struct Row {
    memory: u64,
    /// Share of the experts in memory, 0..=1.
    share: f64,
    #[serde(flatten)]
    speed: Speed,
    /// Whether this is the requested memory size.
    asked: bool,
}

#[derive(Debug, Serialize)]
struct Published {
    /// Values of `--cpu` and `--disk`.
    cpu: &'static str,
    disk: &'static str,
    #[serde(flatten)]
    speed: Speed,
}

pub fn run(args: &Args, file: Option<&PathBuf>, json: JsonArgs) -> anyhow::Result<()> {
    let gguf = match (&args.shape, file) {
        (Some(name), _) => header_of(name, args.dtype)?,
        (None, Some(file)) => Gguf::open_partial(file)?,
        (None, None) => bail!("--forecast: give a file, or --shape NAME"),
    };
    json.print(&of(args, &gguf, None)?)
}

/// The forecast of a model that is here, in `memory` bytes (`None`: what is available), with a disk and a GPU's link
/// that were measured, in bytes per second.
///
/// # Errors
/// As [`run`].
pub fn here(
    gguf: &Gguf,
    memory: Option<u64>,
    ctx: u32,
    (disk, link): (Option<f64>, Option<f64>),
) -> anyhow::Result<Report> {
    let args = Args {
        forecast: true,
        shape: None,
        dtype: None,
        ram: memory,
        disk: disk.map(|bytes| Rate { bytes, from: Origin::Measured }),
        cpu: None,
        gpu: None,
        ctx,
        prompt: 512,
    };
    of(&args, gguf, link)
}

fn of(args: &Args, gguf: &Gguf, link: Option<f64>) -> anyhow::Result<Report> {
    if Pack::is_pack(gguf) {
        bail!(
            "{}: this is an expert pack; forecasts are of plain models: name the one that it was made of",
            gguf.files[0].path.display()
        );
    }
    let shape = Shape::of(gguf)?;
    let mut types: Vec<GgmlType> =
        shape.per_token.experts.keys().chain(shape.per_token.ordinary.keys()).copied().collect();
    types.sort_unstable();
    types.dedup();
    let is_there = args.shape.is_none() && gguf.missing_bytes() == 0;
    let mut machine = Machine::of(args, is_there.then_some(gguf), &types)?;
    if let Some(device) = machine.host.device.as_mut().filter(|_| link.is_some()) {
        device.link = link;
    }
    report(args, gguf, shape, machine)
}

/// The forecast of a model on a machine.
fn report(args: &Args, gguf: &Gguf, shape: Shape, machine: Machine) -> anyhow::Result<Report> {
    let missing = gguf.missing_bytes();
    let task = Task { n_ctx: args.ctx.into(), n_prompt: args.prompt };
    let expectation = Expectation::of(shape.n_expert());
    let locality = format!("recordings of other models, carried over to {} experts", shape.n_expert());

    let (forecast, refused) = match forecast(&shape, &machine.host, &task, &expectation) {
        Ok(forecast) => (Some(forecast), None),
        Err(ForecastError::Plan(error)) => (None, Some(refusal(&error))),
        Err(error) => return Err(error.into()),
    };
    let one = shape.layers.first().map_or(0, |layer| layer.expert_bytes);
    let token_bytes = shape.per_token.experts.values().chain(shape.per_token.ordinary.values()).sum();
    Ok(Report {
        model: Model {
            name: args.shape.clone().unwrap_or_else(|| shape.name.clone()),
            architecture: shape.architecture.clone(),
            n_parameters: shape.n_parameters,
            n_parameters_used: shape.per_token.n_parameters,
            tensor_bytes: shape.tensor_bytes,
            expert_bytes: shape.expert_bytes,
            n_layers: shape.layers.len(),
            n_expert: shape.n_expert(),
            n_expert_used: shape.n_expert_used,
            one_expert_bytes: one,
            token_bytes,
            kv_bytes_per_token: shape.per_token.kv_bytes,
            partial: (args.shape.is_none() && missing > 0).then(|| (gguf.file_bytes(), missing)),
        },
        memory: rows(&shape, &machine.host, &task, &expectation),
        published: match machine.load {
            Some(_) => usual(&shape, &machine.host, &task, &expectation),
            None => Vec::new(),
        },
        machine,
        task,
        locality,
        forecast,
        refused,
    })
}

/// Why a model does not run there, with the remedy in flags of this tool.
fn refusal(error: &PlanError) -> String {
    match error {
        PlanError::TooSmall { minimum, holds: Holds::NoExpert | Holds::AllExperts, .. } => {
            format!("{error}; give it {} MiB of memory, or a smaller context", minimum.div_ceil(MIB) + 1)
        }
        _ => error.to_string(),
    }
}

/// Forecasts for usual machines with as much memory as this one.
fn usual(shape: &Shape, host: &Host, task: &Task, expectation: &Expectation) -> Vec<Published> {
    let of = |(cpu, disk): (&'static str, &'static str)| {
        let memory = Cpu { memory: published::memory(cpu)?, ..Cpu::default() };
        let host = Host { cpu: memory, disk: published::disk(disk)?, ..host.clone() };
        let (_, speed) = expected_speed(shape, &host, task, expectation).ok()?;
        Some(Published { cpu, disk, speed })
    };
    published::USUAL.into_iter().filter_map(of).collect()
}

/// The header that `synth` would write.
fn header_of(name: &str, dtype: Option<Format>) -> anyhow::Result<Gguf> {
    let mut spec = Spec::preset(name)?;
    if let Some(dtype) = dtype {
        spec = Spec { types: vec![dtype], down_types: Vec::new(), dense_type: None, ..spec };
    }
    let mut file = tempfile::Builder::new().prefix(&format!("{name}-")).suffix(".gguf").tempfile()?;
    file.write_all(&synth::header(&spec)?)?;
    Ok(Gguf::open_partial(file.path())?)
}

/// Rows from the smallest sufficient memory to one that holds everything, with the requested size.
fn rows(shape: &Shape, host: &Host, task: &Task, expectation: &Expectation) -> Vec<Row> {
    let of = |memory: u64| {
        let (share, speed) = expected_speed(shape, &Host { memory, ..host.clone() }, task, expectation).ok()?;
        Some(Row { memory, share, speed, asked: memory == host.memory })
    };
    let needed = shape.tensor_bytes.saturating_add(shape.tensor_bytes / 10);
    let mut sizes: Vec<u64> =
        SIZES_GIB.map(|gib| gib * GIB).into_iter().filter(|size| *size > shape.ordinary_bytes).collect();
    let enough = sizes.partition_point(|size| *size < needed) + 1;
    sizes.truncate(enough);
    // Skip sizes that would be refused; when there are too many, keep the largest, which are the common ones.
    sizes.retain(|size| hobbit_core::forecast::rooms(shape, &Host { memory: *size, ..host.clone() }, task).is_ok());
    let skip = sizes.len().saturating_sub(ROWS_MAX);
    sizes.drain(..skip);
    if !sizes.contains(&host.memory) {
        sizes.push(host.memory);
    }
    sizes.sort_unstable();
    sizes.into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_busy_machine_is_offered_published_rates() {
        let words = ["", "--forecast", "--shape", "gpt-oss-20b", "--ram", "8GiB", "--disk", "1MB/s", "--cpu", "1MB/s"];
        let Line { args } = Line::parse_from(words);
        let gguf = header_of("gpt-oss-20b", None).unwrap();
        let machine = Machine::of(&args, None, &[]).unwrap();
        let page = |load| {
            let machine = Machine { load, ..machine.clone() };
            report(&args, &gguf, Shape::of(&gguf).unwrap(), machine).unwrap().to_string()
        };
        let busy = page(Some(5.25));
        assert!(busy.contains("warning: this machine is busy (load 5.2), so measured rates may be too low:"), "{busy}");
        for (cpu, disk) in published::USUAL {
            // The forecast with these flags given.
            let given =
                Machine::of(&Line::parse_from([&words[..6], &["--disk", disk, "--cpu", cpu]].concat()).args, None, &[]);
            let asked = report(&args, &gguf, Shape::of(&gguf).unwrap(), given.unwrap()).unwrap().to_string();
            let speed =
                asked.lines().find(|line| line.ends_with("  <")).unwrap().split_whitespace().rev().nth(2).unwrap();
            let row = busy.lines().find(|line| line.contains(&format!("--cpu {cpu} --disk {disk} "))).unwrap();
            assert!(row.ends_with(&format!(" {speed} t/s")), "{row}: {speed}");
            assert!(asked.contains("(published: an upper bound)"), "{asked}");
        }
        assert!(!page(None).contains("--cpu"));
    }
}
