//! Reads from copies of the files.

use std::fs;

use super::*;
use crate::files::FileState;

/// What is told about mirrors that are left out.
type Told = Arc<std::sync::Mutex<Vec<String>>>;

fn original(path: &Path) -> Original {
    Original::open(path, FileState::at(path).unwrap()).unwrap()
}

/// Copies of `files` whose files end after `lens` bytes, in directories of their own.
struct Rig {
    folder: tempfile::TempDir,
    originals: Vec<Original>,
    told: Told,
}

impl Rig {
    fn new(files: &Files) -> Self {
        let folder = tempfile::tempdir_in(files.folder.path()).unwrap();
        Self { folder, originals: files.paths().iter().map(|path| original(path)).collect(), told: Told::default() }
    }

    /// A copy with the given lengths; 0 leaves a file out.
    fn mirror(&self, files: &Files, name: &str, lens: [usize; 2]) -> Mirror {
        let dir = self.folder.path().join(name);
        fs::create_dir(&dir).unwrap();
        for (file, len) in lens.into_iter().enumerate().filter(|(_, len)| *len > 0) {
            fs::write(dir.join(file.to_string()), &files.contents[file][..len]).unwrap();
        }
        Mirror::open(&dir, &self.originals).unwrap()
    }

    fn copies(&self, original: Arc<dyn Store>, mirrors: Vec<(Mirror, Arc<dyn Store>)>) -> Copies {
        let (told, path) = (Arc::clone(&self.told), self.originals[0].path.clone());
        let bytes = self.originals.iter().map(|original| original.state.len).sum();
        let tell = move |line: &str| told.lock().unwrap().push(line.to_owned());
        Copies::new((original, path, self.originals.len(), bytes), mirrors, tell)
    }

    fn told(&self) -> Vec<String> {
        self.told.lock().unwrap().clone()
    }
}

/// Reads every extent of [`extents`] and checks the bytes.
fn check(files: &Files, store: &dyn Store, name: &str) {
    let extents = extents();
    let memory = SlotMemory::new(extents.len(), slot_stride(3_000_017) as usize);
    for wanted_lead in [None, Some(64)] {
        let lead = |extent: &Extent| wanted_lead.unwrap_or_else(|| lead_of(extent));
        let places = extents.iter().zip(0..);
        let requests = places.map(|(extent, slot)| memory.request(slot as u64, *extent, slot, lead(extent)));
        let answers = read_sorted(store, requests);
        for (slot, (extent, done)) in extents.iter().zip(&answers).enumerate() {
            let moved = *done.result.as_ref().unwrap_or_else(|error| panic!("{name} {extent:?}: {error}"));
            assert!(moved >= extent.len, "{name} {extent:?}: {moved}");
            let got = memory.bytes(slot, lead(extent), extent.len as usize);
            assert!(got == files.expected(extent), "{name} {extent:?} lead {wanted_lead:?}");
        }
    }
}

fn kinds(files: &Files) -> Vec<StoreKind> {
    let direct = files.direct(direct::DirectOptions::default()).map(|_| StoreKind::Direct);
    [StoreKind::Buffered].into_iter().chain(direct).collect()
}

#[test]
fn reads_are_divided_among_copies_whole_and_partial() {
    let files = Files::new();
    for kind in kinds(&files) {
        for of_mirror in kinds(&files) {
            let rig = Rig::new(&files);
            let mirrors = [("whole", [3_000_017, 70_001]), ("part", [1_000_001, 0])].map(|(name, lens)| {
                let mirror = rig.mirror(&files, name, lens);
                let store = open_originals(of_mirror, mirror.files()).unwrap();
                (mirror, store)
            });
            let store = rig.copies(open(kind, &files.paths()).unwrap(), mirrors.into());
            for _ in 0..3 {
                check(&files, &store, &format!("{kind}, {of_mirror}"));
            }
            let copies = store.copies();
            let bytes: Vec<u64> = copies.iter().map(|copy| copy.bytes).collect();
            assert_eq!(bytes, [3_070_018, 3_070_018, 1_000_001]);
            assert!((copies.iter().map(|copy| copy.share).sum::<f64>() - 1.0).abs() < 1e-9);
            let wanted: u64 = extents().iter().map(|extent| extent.len).sum();
            assert_eq!(copies.iter().map(|copy| copy.bytes_read).sum::<u64>(), 6 * wanted, "{copies:?}");
            let is_read = |copy: &CopyReport| copy.reads > 0 && copy.bytes_per_second > Some(0.0);
            assert!(copies.iter().all(|copy| is_read(copy) && copy.left_out.is_none()), "{copies:?}");
            assert!(rig.told().is_empty());
        }
    }
}

#[test]
fn a_mirror_that_fails_is_left_out_and_its_reads_are_repeated() {
    let files = Files::new();
    for kind in kinds(&files) {
        let rig = Rig::new(&files);
        let mirror = rig.mirror(&files, "whole", [3_000_017, 70_001]);
        let faults = Faults { io_error: vec![3], ..Faults::default() };
        let failing: Arc<dyn Store> = Arc::new(FaultyStore::new(open_originals(kind, mirror.files()).unwrap(), faults));
        let store = rig.copies(open(kind, &files.paths()).unwrap(), vec![(mirror, failing)]);
        check(&files, &store, kind.name());
        let told = rig.told();
        assert!(told.len() == 1 && told[0].contains("whole: this mirror is not read any more: reading"), "{told:?}");
        let before = store.copies()[1].clone();
        assert!(
            before.left_out.is_some_and(|reason| reason.contains(&std::io::Error::from_raw_os_error(5).to_string()))
        );
        check(&files, &store, kind.name());
        assert_eq!(store.copies()[1].reads, before.reads);
    }
}

/// Other bytes of the same length, a cut, and both.
#[test]
fn a_mirror_that_is_written_to_gives_no_byte() {
    let files = Files::new();
    for kind in kinds(&files) {
        for (name, len) in [("rewritten", 3_000_017), ("cut", 1_500_000), ("cut and rewritten", 1_500_000)] {
            let rig = Rig::new(&files);
            let mirror = rig.mirror(&files, "whole", [3_000_017, 70_001]);
            let (path, state) = (mirror.files()[0].path.clone(), mirror.files()[0].state);
            let of_mirror = open_originals(kind, mirror.files()).unwrap();
            let store = rig.copies(open(kind, &files.paths()).unwrap(), vec![(mirror, of_mirror)]);
            if name == "cut" {
                fs::File::options().write(true).open(&path).unwrap().set_len(len as u64).unwrap();
            } else {
                fs::write(&path, vec![0xDD; len]).unwrap();
            }
            // The file system's clock counts in ticks: write until its time differs from that of the first write.
            while FileState::at(&path).unwrap().is_unwritten_since(&state) {
                fs::write(&path, vec![0xDD; len]).unwrap();
            }
            check(&files, &store, &format!("{kind}, {name}"));
            let told = rig.told();
            assert!(told.len() == 1 && told[0].contains("is not read any more"), "{name}: {told:?}");
        }
    }
}

#[test]
fn dropping_the_store_answers_what_it_has_accepted() {
    let files = Files::new();
    let memory = SlotMemory::new(8, slot_stride(1_000_000) as usize);
    for kind in kinds(&files) {
        let rig = Rig::new(&files);
        let mirror = rig.mirror(&files, "whole", [3_000_017, 70_001]);
        let faults = Faults { io_error: vec![1, 5], ..Faults::default() };
        let failing: Arc<dyn Store> = Arc::new(FaultyStore::new(open_originals(kind, mirror.files()).unwrap(), faults));
        let store = rig.copies(open(kind, &files.paths()).unwrap(), vec![(mirror, failing)]);
        let (sender, answers) = unbounded();
        let sink: Arc<dyn Completion> = Arc::new(sender);
        let extent = |slot| Extent { file: 0, offset: slot as u64 * 1000, len: 1_000_000 };
        store.submit((0..8).map(|slot| memory.request(slot as u64, extent(slot), slot, 0)).collect(), &sink);
        drop(store);
        drop(sink);
        assert_eq!(answers.iter().filter(|done| done.result.is_ok()).count(), 8, "{kind}");
    }
}
