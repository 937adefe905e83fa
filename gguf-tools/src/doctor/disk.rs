//! The disk of a file: its file system, and random reads of an expert's size.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hobbit_core::expert::Extent;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::Pack;
use hobbit_core::store::{self, StoreKind, measure_random_read, probe};
use hobbit_core::units::{GIB, MIB};
use serde::Serialize;

use super::Part;
use super::host::Read;

/// Reads at a time.
const DEPTHS: [usize; 3] = [1, 4, 16];
/// Maximum bytes of one measurement.
const BYTES_MAX: u64 = GIB;
/// Size of a read of a file without experts.
const READ_BYTES: u64 = MIB;
/// A measurement of buffered reads says something of the disk if at least this share came from it.
const FROM_DISK_MIN: f64 = 0.9;

#[derive(Clone, Debug, Serialize)]
pub struct Disk {
    /// The file that was read.
    pub file: String,
    pub place: Part<Place>,
    /// Whether the file can be read past the page cache.
    pub direct: Part<bool>,
    pub io_uring: Part<bool>,
    /// Bytes of a read, and whether they are an expert's slice.
    pub read_bytes: u64,
    pub is_expert: bool,
    /// Direct and buffered, each by depth.
    pub reads: Vec<Part<Reads>>,
}

/// A file system, and the device below it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Place {
    pub file_system: String,
    /// The kernel's name of the device.
    pub device: Option<String>,
    pub rotational: Option<bool>,
    pub read_ahead_kib: Option<u64>,
    /// Why reads are slow on file systems of this type.
    pub quirk: Option<&'static str>,
}

/// Why reads are slow on file systems of this type.
fn quirk(file_system: &str) -> Option<&'static str> {
    Some(match file_system.strip_prefix("fuse.").unwrap_or(file_system) {
        "9p" | "virtiofs" | "vboxsf" | "vmhgfs-fuse" => {
            "shared with the machine around this one (in WSL2: a Windows drive); a copy on a disk of its own is usually \
             read faster"
        }
        "nfs" | "nfs4" | "cifs" | "smb3" | "sshfs" | "ceph" | "rclone" | "s3fs" => {
            "over the network; a copy on a local disk is usually read faster"
        }
        "fuse" | "fuseblk" => "served by another program (FUSE), which takes time for each read",
        "btrfs" => "compressed files cannot be read past the page cache",
        "zfs" => "reads go through its own cache (ARC) before version 2.3",
        "tmpfs" | "ramfs" => "in memory: the file takes room that experts could have",
        _ => return None,
    })
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reads {
    pub kind: &'static str,
    pub depth: usize,
    pub bytes_per_second: f64,
    /// Share of the bytes that the disk delivered, by the kernel's count; the rest came from the page cache.
    pub from_disk: Option<f64>,
}

/// Places and size of the reads in a model's file.
struct Target {
    files: Vec<PathBuf>,
    ranges: Vec<Extent>,
    read_bytes: u64,
    is_expert: bool,
}

impl Target {
    fn of(gguf: &Gguf) -> anyhow::Result<Self> {
        let files = gguf.files.iter().map(|file| file.path.clone()).collect();
        let experts = if Pack::is_pack(gguf) { None } else { Some(gguf.experts()?).filter(|map| !map.is_empty()) };
        let tensors: Vec<_> = experts.iter().flat_map(|map| &map.layers).flat_map(|layer| &layer.tensors).collect();
        let read_bytes = tensors.iter().map(|tensor| tensor.slice_bytes).sum::<u64>() / tensors.len().max(1) as u64;
        let ranges = tensors.iter().map(|tensor| {
            let first = tensor.extent(0);
            Extent { len: first.len * u64::from(tensor.n_expert), ..first }
        });
        if read_bytes > 0 {
            return Ok(Self { files, ranges: ranges.collect(), read_bytes, is_expert: true });
        }
        let len = gguf.files[0].len;
        let read_bytes = READ_BYTES.min(len / DEPTHS.len() as u64).max(1);
        Ok(Self { files, ranges: vec![Extent { file: 0, offset: 0, len }], read_bytes, is_expert: false })
    }

    /// A part of the ranges for each depth: what one measurement has read is in the page cache for the next.
    fn part(&self, at: usize) -> Vec<Extent> {
        let n = DEPTHS.len() as u64;
        let part = |range: &Extent| {
            let len = range.len / n;
            Extent { offset: range.offset + at as u64 * len, len, ..*range }
        };
        self.ranges.iter().map(part).collect()
    }
}

impl Disk {
    /// Measures for `time` each; `step` is called before a measurement, and ends them by an error.
    pub fn of(
        gguf: &Gguf,
        is_demo: bool,
        read: Read<'_>,
        time: Duration,
        step: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let mut target = Target::of(gguf)?;
        if is_demo {
            // Its experts are far smaller than those of models that do not fit.
            target = Target {
                ranges: vec![Extent { file: 0, offset: 0, len: gguf.files[0].len }],
                read_bytes: READ_BYTES,
                is_expert: false,
                ..target
            };
        }
        let path = &target.files[0];
        let (direct, io_uring) = (probe::direct(path), probe::io_uring());
        let mut reads = Vec::new();
        for kind in [StoreKind::Direct, StoreKind::Buffered] {
            let name = if kind == StoreKind::Direct { "direct" } else { "buffered" };
            let refusal = direct.as_ref().err().or(io_uring.as_ref().err());
            if let Some(why) = refusal.filter(|_| kind == StoreKind::Direct) {
                reads.push(Part::unknown(format!("direct reads: {why}")));
                continue;
            }
            for (at, &depth) in DEPTHS.iter().enumerate() {
                step()?;
                let measured = measure(&target, kind, at, depth, time);
                reads.push(match measured {
                    Ok((bytes_per_second, from_disk)) => {
                        Part::Known(Reads { kind: name, depth, bytes_per_second, from_disk })
                    }
                    Err(error) => Part::unknown(format!("{name} reads, {depth} at a time: {error:#}")),
                });
            }
        }
        let of = |probed: &Result<(), String>| match probed {
            Ok(()) => Part::Known(true),
            Err(why) => Part::unknown(why.clone()),
        };
        Ok(Self {
            file: crate::shared::file_name(path),
            place: Part::of(place(path, read), "the system does not show its file system"),
            direct: of(&direct),
            io_uring: of(&io_uring),
            read_bytes: target.read_bytes,
            is_expert: target.is_expert,
            reads,
        })
    }

    /// The fastest random reads that came from the disk, in bytes per second.
    pub fn best(&self) -> Option<f64> {
        let is_of_disk =
            |reads: &&Reads| reads.kind == "direct" || reads.from_disk.is_some_and(|share| share >= FROM_DISK_MIN);
        let known = self.reads.iter().filter_map(Part::known);
        known.filter(is_of_disk).map(|reads| reads.bytes_per_second).reduce(f64::max)
    }
}

/// Bytes per second, and the share that the disk delivered.
fn measure(
    target: &Target,
    kind: StoreKind,
    at: usize,
    depth: usize,
    time: Duration,
) -> anyhow::Result<(f64, Option<f64>)> {
    let store = store::open(kind, &target.files)?;
    let before = disk_bytes();
    let measured = measure_random_read(&*store, &target.part(at), target.read_bytes, depth, BYTES_MAX, time)?;
    anyhow::ensure!(measured.bytes > 0, "the file is too small");
    let from_disk = before.zip(disk_bytes()).map(|(before, after)| (after - before) as f64 / measured.bytes as f64);
    Ok((measured.bytes_per_second(), from_disk.map(|share| share.min(1.0))))
}

/// Bytes that the kernel has fetched from disks for this process.
fn disk_bytes() -> Option<u64> {
    let io = fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
}

/// The system's own list of disks may wait for one that is gone: only where there is no other.
#[cfg(not(target_os = "linux"))]
fn place(path: &Path, _: Read<'_>) -> Option<Place> {
    use sysinfo::{DiskKind, DiskRefreshKind, Disks};

    let path = std::path::absolute(path).ok()?;
    let disks = Disks::new_with_refreshed_list_specifics(DiskRefreshKind::nothing().with_kind());
    let holds = disks.list().iter().filter(|disk| path.starts_with(disk.mount_point()));
    let disk = holds.max_by_key(|disk| disk.mount_point().as_os_str().len())?;
    Some(Place {
        file_system: disk.file_system().to_string_lossy().into_owned(),
        device: None,
        rotational: match disk.kind() {
            DiskKind::HDD => Some(true),
            DiskKind::SSD => Some(false),
            DiskKind::Unknown(_) => None,
        },
        read_ahead_kib: None,
        quirk: quirk(&disk.file_system().to_string_lossy()),
    })
}

#[cfg(target_os = "linux")]
fn place(path: &Path, read: Read<'_>) -> Option<Place> {
    mounted(&fs::canonicalize(path).ok()?, &read(Path::new("/proc/self/mountinfo"))?, read)
}

/// The file system that Linux's `mountinfo` shows mounted nearest above a path.
#[cfg(any(test, target_os = "linux"))]
fn mounted(path: &Path, mountinfo: &str, read: Read<'_>) -> Option<Place> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(2);
        let (numbers, mount) = (place.next()?, place.nth(1)?.replace("\\040", " "));
        path.starts_with(&mount).then_some((mount.len(), numbers, kind.split(' ').next()?))
    });
    // If several file systems are mounted at one place, the last one is visible.
    let (_, numbers, file_system) = mounts.max_by_key(|mount| mount.0)?;
    let number = |path: String| read(Path::new(&path))?.trim().parse::<u64>().ok();
    let block = |file: &str| {
        let of_disk = format!("/sys/dev/block/{numbers}/{file}");
        // A partition has them in the directory of its disk.
        number(of_disk).or_else(|| number(format!("/sys/dev/block/{numbers}/../{file}")))
    };
    let device = read(Path::new(&format!("/sys/dev/block/{numbers}/uevent")));
    Some(Place {
        file_system: file_system.to_owned(),
        device: device.and_then(|text| Some(text.lines().find_map(|line| line.strip_prefix("DEVNAME="))?.to_owned())),
        rotational: block("queue/rotational").map(|value| value != 0),
        read_ahead_kib: number(format!("/sys/class/bdi/{numbers}/read_ahead_kb"))
            .or_else(|| block("queue/read_ahead_kb")),
        quirk: quirk(file_system),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_mount_is_a_files() {
        let mountinfo = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
             30 22 259:2 / /home rw shared:1 - btrfs /dev/nvme0n1p2 rw\n\
             31 22 0:40 / /home/my\\040models rw - 9p models rw\n";
        let read = |path: &Path| match path.to_str()? {
            "/sys/dev/block/259:2/uevent" => Some("MAJOR=259\nDEVNAME=nvme0n1p2\n".to_owned()),
            "/sys/dev/block/259:2/../queue/rotational" => Some("0\n".to_owned()),
            "/sys/class/bdi/259:2/read_ahead_kb" => Some("128\n".to_owned()),
            _ => None,
        };
        let of = |path: &str| mounted(Path::new(path), mountinfo, &read).unwrap();
        let place = of("/home/me/model.gguf");
        assert_eq!((&*place.file_system, place.device.as_deref()), ("btrfs", Some("nvme0n1p2")));
        assert_eq!((place.rotational, place.read_ahead_kib), (Some(false), Some(128)));
        assert_eq!((&*of("/home/my models/a.gguf").file_system, &*of("/srv/a.gguf").file_system), ("9p", "ext4"));
        assert!(of("/home/my models/a.gguf").quirk.is_some_and(|words| words.contains("WSL2")));
        assert_eq!((of("/srv/a.gguf").quirk, quirk("NTFS")), (None, None));
        assert!(quirk("fuse.sshfs").is_some_and(|words| words.starts_with("over the network")));
        assert_eq!(mounted(Path::new("/a"), "", &read), None);
    }

    #[test]
    fn each_depth_reads_another_part() {
        let range = Extent { file: 0, offset: 100, len: 31 };
        let target = Target { files: Vec::new(), ranges: vec![range], read_bytes: 1, is_expert: false };
        let parts: Vec<_> = (0..3).map(|at| target.part(at)[0]).collect();
        assert_eq!(
            parts.iter().map(|part| (part.offset, part.len)).collect::<Vec<_>>(),
            [(100, 10), (110, 10), (120, 10)]
        );
    }
}
