//! Path tables as files, written by `gguf-tools profile --path-table` and read by `--path-table`. The format is
//! [`PathTable`]'s.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use super::ProfileError;
use crate::files;
use crate::predict::PathTable;

/// Reads a path table. Reads at most [`PathTable::BYTES_MAX`] bytes of any file.
pub fn read_path_table(path: &Path) -> Result<PathTable, ProfileError> {
    let io = |error| ProfileError::Io { path: path.to_owned(), action: "read", error };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(io)?;
    file.take(PathTable::BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io)?;
    PathTable::from_bytes(&bytes).map_err(|error| ProfileError::PathTable { path: path.to_owned(), error })
}

pub fn write_path_table(path: &Path, table: &PathTable) -> Result<(), ProfileError> {
    let of_table = |error| ProfileError::PathTable { path: path.to_owned(), error };
    let io = |error| ProfileError::Io { path: path.to_owned(), action: "write", error };
    let bytes = table.encode().map_err(of_table)?;
    files::create(path, files::Kind::PathTable).and_then(|mut file| file.write_all(&bytes)).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::{PathLimits, PathTableBuilder, PredictShape};

    #[test]
    fn files_are_read_as_they_were_written_and_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.paths");
        let shape = PredictShape::new([(1, 4), (2, 4)], |_| 2);
        let mut builder = PathTableBuilder::new(shape, PathLimits::default());
        builder.observe(1, [0, 3]);
        builder.observe(2, [1, 2]);
        let table = builder.build();
        write_path_table(&path, &table).unwrap();
        assert_eq!(read_path_table(&path).unwrap(), table);

        let mut bytes = std::fs::read(&path).unwrap();
        bytes[30] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let message = read_path_table(&path).unwrap_err().to_string();
        assert!(message.contains("a.paths: path table") && message.contains("profile the model again"), "{message}");
        std::fs::write(&path, "GGUF").unwrap();
        let message = read_path_table(&path).unwrap_err().to_string();
        assert!(message.contains("a.paths: not a path table") && message.contains("gguf-tools profile"), "{message}");
        // A sparse file of zeros.
        File::create(&path).unwrap().set_len(PathTable::BYTES_MAX + 2).unwrap();
        assert!(read_path_table(&path).unwrap_err().to_string().contains("not a path table"));
        let message = read_path_table(&dir.path().join("none")).unwrap_err().to_string();
        assert!(message.contains("none: cannot read"), "{message}");
    }
}
