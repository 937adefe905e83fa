//! llama.cpp as it is: the reference.

use std::path::Path;

use hobbit::engine::StockOptions;
use hobbit::options::{AdapterOptions, DeviceChoice, RouteOptions, TensorOverride};
use hobbit::{BatchToken, DeviceOptions, SessionOptions};

use super::script::Evaluate;

/// A model and a context of plain llama.cpp.
pub struct Stock(hobbit::engine::Stock);

/// Which layers and tensors are where.
pub struct Placed<'a> {
    /// By name; none for the CPU alone.
    pub devices: &'a [&'a str],
    pub n_gpu_layers: i32,
    pub tensor_split: &'a [f32],
    /// Tensors that stay on the CPU, as a pattern.
    pub on_cpu: &'a str,
    /// Where tokens are sent.
    pub routes: Option<&'a RouteOptions>,
    pub adapters: AdapterOptions,
}

impl Default for Placed<'_> {
    fn default() -> Self {
        Self {
            devices: &[],
            n_gpu_layers: 999,
            tensor_split: &[],
            on_cpu: "",
            routes: None,
            adapters: AdapterOptions::default(),
        }
    }
}

impl Stock {
    /// Loads `path` (of a split model, its first shard) completely.
    pub fn open(path: &Path, options: &SessionOptions) -> Result<Stock, String> {
        Self::open_on(path, options, &[])
    }

    /// As [`Stock::open`], with weights rearranged for the CPU, as llama.cpp has them by default.
    #[allow(dead_code)]
    pub fn open_repacked(path: &Path, options: &SessionOptions) -> Result<Stock, String> {
        let stock = StockOptions {
            device: DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() },
            n_gpu_layers: 0,
            load_mode: Some("none".to_owned()),
            repack: true,
            routes: None,
            adapters: AdapterOptions::default(),
        };
        hobbit::engine::Stock::open(path, &stock, options).map(Stock).map_err(|error| error.to_string())
    }

    /// As [`Stock::open`], on recorded routes.
    #[allow(dead_code)]
    pub fn open_on_routes(
        path: &Path,
        options: &SessionOptions,
        routes: Option<&RouteOptions>,
    ) -> Result<Stock, String> {
        Self::open_placed(path, options, &Placed { routes, ..Placed::default() })
    }

    /// As [`Stock::open`], with all layers on the devices of these names.
    pub fn open_on(path: &Path, options: &SessionOptions, devices: &[&str]) -> Result<Stock, String> {
        Self::open_placed(path, options, &Placed { devices, ..Placed::default() })
    }

    /// As [`Stock::open`], placed so.
    pub fn open_placed(path: &Path, options: &SessionOptions, placed: &Placed) -> Result<Stock, String> {
        let names: Vec<String> = placed.devices.iter().map(|name| (*name).to_owned()).collect();
        let on_cpu = TensorOverride { pattern: placed.on_cpu.to_owned(), buffer_type: "CPU".to_owned() };
        let stock = StockOptions {
            n_gpu_layers: if names.is_empty() { 0 } else { placed.n_gpu_layers },
            device: DeviceOptions {
                devices: if names.is_empty() { DeviceChoice::None } else { DeviceChoice::Named(names) },
                tensor_split: placed.tensor_split.to_vec(),
                override_tensors: Some(on_cpu).filter(|_| !placed.on_cpu.is_empty()).into_iter().collect(),
                ..DeviceOptions::default()
            },
            load_mode: Some("none".to_owned()),
            repack: false,
            routes: placed.routes.cloned(),
            adapters: placed.adapters.clone(),
        };
        hobbit::engine::Stock::open(path, &stock, options).map(Stock).map_err(|error| error.to_string())
    }
}

impl Evaluate for Stock {
    fn n_vocab(&self) -> usize {
        self.0.n_vocab()
    }

    fn evaluate(&mut self, batch: &[BatchToken]) -> Result<Vec<Vec<f32>>, String> {
        self.0.evaluate(batch).map_err(|error| error.to_string())?;
        let row = |i| self.0.logits_of(i).map(<[f32]>::to_vec).ok_or_else(|| format!("no logits for entry {i}"));
        (0..batch.len()).map(row).collect()
    }
}
