//! Rows under a header, in columns as wide as what is in them.

use crate::terminal::shown;

/// Returns the table as lines; names in cells cannot steer a terminal or break lines.
pub(super) fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let header = header.map(str::to_owned);
    let clean = |row: &[String; N]| row.each_ref().map(|cell| shown(cell).replace('\n', "\\n"));
    let rows = Vec::from_iter(std::iter::once(&header).chain(rows).map(clean));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        Vec::from_iter(cells).join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}
