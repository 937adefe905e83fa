//! Tables.

use super::measure::{Measured, Product};

/// Share of experts that are missed: repacked between their arrival and their product, by all threads together.
pub const MISSED: f64 = 0.25;
/// What repacking has to bring.
pub const GAIN_MIN: f64 = 1.15;

/// The better operation on weights as files have them, by the better one on repacked weights and what repacking costs.
pub fn gain(measured: &Measured, product: &Product, missed: f64, threads: f64) -> Option<f64> {
    let repacked = product.repacked.into_iter().chain(product.repacked_by_id).reduce(f64::min)?;
    let arrival = measured.matrix_bytes as f64 / measured.repack_bytes_per_second? / threads;
    Some(product.raw.min(product.raw_by_id) / (repacked + missed * arrival))
}

/// Both tables.
pub fn print(all: &[Measured], threads: f64) {
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    println!("\n| type | matrix | buffer type | repacking, GB/s of one thread | copying |\n|---|---|---|---|---|");
    for measured in all {
        println!(
            "| {} | {} x {} | {} | {} | {} |",
            measured.dtype,
            measured.n_per_row,
            measured.n_rows,
            measured.buffer_type.as_deref().unwrap_or("as it is"),
            number(measured.repack_bytes_per_second.map(|speed| speed / 1e9)),
            number(measured.copy_bytes_per_second.map(|speed| speed / 1e9)),
        );
    }
    println!(
        "\nMicroseconds a product; how much faster the better one is on repacked weights where none are missed, and \
         where {:.0} % are and are repacked first.\n",
        MISSED * 100.0
    );
    println!(
        "| type | matrix | rows | `MUL_MAT` | `MUL_MAT_ID` | repacked `MUL_MAT` | repacked `MUL_MAT_ID` | gain | net | \
         difference | of the two repacked |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for measured in all {
        for product in &measured.products {
            let time = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{:.1}", value * 1e6));
            let differences = product.difference.into_iter().chain(product.difference_by_id);
            println!(
                "| {} | {} x {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                measured.dtype,
                measured.n_per_row,
                measured.n_rows,
                product.rows,
                time(Some(product.raw)),
                time(Some(product.raw_by_id)),
                time(product.repacked),
                time(product.repacked_by_id),
                number(gain(measured, product, 0.0, threads)),
                number(gain(measured, product, MISSED, threads)),
                difference(differences.reduce(f64::max)),
                difference(product.difference_of_operations),
            );
        }
    }
}

fn difference(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(0.0) => "none".to_owned(),
        Some(value) => format!("{value:.0e}"),
    }
}
