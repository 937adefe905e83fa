//! Energy of the processor package, where the machine counts it (RAPL).

use std::fs;
use std::path::{Path, PathBuf};

/// The packages' counters.
#[derive(Clone, Debug, Default)]
pub struct Energy {
    /// Where each counter lies, and where it begins again, in microjoules.
    packages: Vec<(PathBuf, u64)>,
}

/// What the counters said, in microjoules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading(Vec<u64>);

impl Energy {
    /// The counters that can be read: none on most virtual machines, and for others than root on most systems.
    pub fn find() -> Self {
        Self::below(Path::new("/sys/class/powercap"))
    }

    fn below(dir: &Path) -> Self {
        let mut packages: Vec<(PathBuf, u64)> = fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            // Packages are intel-rapl:0; their parts, which they include, are intel-rapl:0:0.
            .filter(|entry| {
                let name = entry.file_name();
                name.to_str().and_then(|name| name.strip_prefix("intel-rapl:")).is_some_and(|rest| !rest.contains(':'))
            })
            .filter_map(|entry| {
                let range = number(&entry.path().join("max_energy_range_uj"))?;
                let counter = entry.path().join("energy_uj");
                number(&counter).map(|_| (counter, range))
            })
            .collect();
        packages.sort();
        Self { packages }
    }

    /// What they say now; `None` where there are none.
    pub fn read(&self) -> Option<Reading> {
        let values: Option<Vec<u64>> = self.packages.iter().map(|(counter, _)| number(counter)).collect();
        values.filter(|values| !values.is_empty()).map(Reading)
    }

    /// Microjoules from `before` to `after`, a counter having begun again once at most.
    pub fn between(&self, before: &Reading, after: &Reading) -> u64 {
        let both = before.0.iter().zip(&after.0).zip(&self.packages);
        both.map(|((before, after), (_, range))| match after.checked_sub(*before) {
            Some(energy) => energy,
            None => (range - before.min(range)).saturating_add(*after),
        })
        .fold(0, u64::saturating_add)
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_summed_and_counters_begin_again() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, energy: u64| {
            let package = dir.path().join(name);
            fs::create_dir_all(&package).unwrap();
            fs::write(package.join("max_energy_range_uj"), "1000\n").unwrap();
            fs::write(package.join("energy_uj"), format!("{energy}\n")).unwrap();
        };
        assert_eq!(Energy::below(dir.path()).read(), None);
        write("intel-rapl:0", 100);
        write("intel-rapl:1", 990);
        write("intel-rapl:0:0", 7); // a part of the first
        let energy = Energy::below(dir.path());
        let before = energy.read().unwrap();
        assert_eq!(before, Reading(vec![100, 990]));
        write("intel-rapl:0", 150);
        write("intel-rapl:1", 20);
        assert_eq!(energy.between(&before, &energy.read().unwrap()), 50 + 30);
        assert_eq!(Energy::below(Path::new("/nowhere")).read(), None);
    }
}
