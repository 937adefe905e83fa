//! `--list-devices`.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use serde_json::json;

use super::output::write_json;
use hobbit::{DeviceInfo, DeviceKind, devices};
use hobbit_core::files::{self, Kind, Output};

/// Prints the devices other than the CPU as llama.cpp does, with their capabilities if `verbose`. `json` is the flag
/// and path for JSON output; '-' is stdout, which then contains nothing else.
pub fn list(rpc: &[String], verbose: bool, json: Option<(&str, &Path)>) -> Result<()> {
    let outputs = json.map(|(flag, path)| Output { flag, path, kind: Kind::Json });
    files::check(outputs.as_slice(), &[])?;
    let found = devices(rpc)?;
    let found: Vec<&DeviceInfo> = found.iter().filter(|device| device.kind != DeviceKind::Cpu).collect();
    if let Some((_, path)) = json {
        write_json(path, &json!({ "devices": found }), "devices")?;
        if path == Path::new("-") {
            return Ok(());
        }
    }
    let mut out = io::stdout().lock();
    writeln!(out, "Available devices:")?;
    if found.is_empty() {
        writeln!(out, "  (none)")?;
    }
    for device in found {
        let (total, free) = (device.total >> 20, device.free >> 20);
        writeln!(out, "  {}: {} ({total} MiB, {free} MiB free)", device.name, device.description)?;
        if verbose {
            writeln!(out, "    {}", abilities(device))?;
        }
    }
    Ok(out.flush()?)
}

fn abilities(device: &DeviceInfo) -> String {
    let kind = match device.kind {
        DeviceKind::Cpu => "the CPU",
        DeviceKind::Gpu => "GPU",
        DeviceKind::Integrated => "integrated GPU",
        DeviceKind::Accelerator => "helper of the CPU, holds no layers",
    };
    let has = |has: bool| if has { "yes" } else { "no" };
    format!(
        "{kind}; experts in place in host memory: {}, pinned host memory: {}, asynchronous: {}, events: {}",
        has(device.unified),
        has(device.pinned_host),
        has(device.asynchronous),
        has(device.events)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_listings_say_what_each_can_do() {
        let device = DeviceInfo {
            name: "CUDA0".into(),
            description: "d".into(),
            kind: DeviceKind::Gpu,
            free: 1,
            total: 2,
            pinned_host: true,
            asynchronous: true,
            events: false,
            unified: false,
        };
        let expected =
            "GPU; experts in place in host memory: no, pinned host memory: yes, asynchronous: yes, events: no";
        assert_eq!(abilities(&device), expected);
        assert_eq!(json!(device)["kind"], "gpu");
    }
}
