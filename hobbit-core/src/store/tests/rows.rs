//! Rows that are rearranged on their way.

use super::*;

const GROUP: usize = 48;

/// Turns each group around.
struct Reversed;

impl Rearrange for Reversed {
    fn rearrange(&self, rows: &[u8], out: &mut [u8]) {
        assert!(rows.len() == out.len() && rows.len().is_multiple_of(GROUP));
        out.copy_from_slice(rows);
        out.chunks_mut(GROUP).for_each(<[u8]>::reverse);
    }
}

fn reversed(rows: &[u8]) -> Vec<u8> {
    let mut out = vec![0; rows.len()];
    Reversed.rearrange(rows, &mut out);
    out
}

fn bytes() -> Vec<u8> {
    (0..5_000_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn rows(offset: u64, groups: u64, to: usize) -> Rows {
    let order = Order::Other(Arc::new(Reversed));
    Rows { offset, bytes: groups * GROUP as u64, group_bytes: GROUP as u64, to, order }
}

/// Several units, one, and less than a block; two matrices of one request, of which one stays as it is.
#[test]
fn every_engine_gives_rows_their_order() {
    let bytes = bytes();
    let files = Files::of(vec![bytes.clone()]);
    let memory = SlotMemory::new(1, 4 << 20);
    let as_is = |rows: Rows| Rows { order: Order::AsIs, group_bytes: 1, ..rows };
    let cases = [
        vec![rows(4096, 64_000, 0)],
        vec![rows(32, 21_674, 32)],
        vec![rows(4095, 1, 4095)],
        vec![rows(100_000, 30_000, 64), as_is(rows(2_000_001, 30_000, 1_500_001))],
    ];
    for (name, store) in files.stores() {
        for (i, matrices) in cases.iter().enumerate() {
            let end = matrices.iter().map(|rows| rows.offset + rows.bytes).max().unwrap();
            let extent = Extent { file: 0, offset: matrices[0].offset, len: end - matrices[0].offset };
            let request = ReadRequest { form: Form::Rows(matrices.clone()), ..memory.request(1, extent, 0, 0) };
            let wanted: u64 = matrices.iter().map(|rows| rows.bytes).sum();
            assert_eq!(request.bytes(), wanted);
            let done = read_one(&*store, request);
            let moved = done.result.unwrap_or_else(|error| panic!("{name} {i}: {error}"));
            assert!(moved >= wanted && moved < wanted + 8 * 8192, "{name} {i}: {moved} of {wanted}");
            for matrix in matrices {
                let here = &bytes[matrix.offset as usize..][..matrix.bytes as usize];
                let expected = if matrix.order == Order::AsIs { here.to_vec() } else { reversed(here) };
                assert!(memory.bytes(0, matrix.to, expected.len()) == expected, "{name} {i}");
            }
        }
    }
}

#[test]
fn rows_that_cannot_be_right_are_refused() {
    let files = Files::of(vec![bytes()]);
    let memory = SlotMemory::new(1, 8192);
    let extent = Extent { file: 0, offset: 4096, len: 4800 };
    assert_refused(&files, || {
        [
            rows(4096, 101, 0),
            rows(4095, 100, 0),
            rows(4096, 100, 8192 - 4799),
            rows(4096, 100, usize::MAX),
            Rows { offset: u64::MAX, ..rows(4096, 100, 0) },
            Rows { bytes: u64::MAX, ..rows(4096, 100, 0) },
            Rows { bytes: 4799, ..rows(4096, 100, 0) },
            Rows { group_bytes: 0, ..rows(4096, 100, 0) },
            Rows { group_bytes: 1 << 20, ..rows(4096, 100, 0) },
        ]
        .map(|rows| ReadRequest { form: Form::Rows(vec![rows]), ..memory.request(1, extent, 0, 0) })
        .into()
    });
}
