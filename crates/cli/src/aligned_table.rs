//! Tables of figures: a name on the left, numbers on the right.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use crate::terminal::shown;

/// A line under the header, and no other.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Returns a table as lines; all columns but those named in `texts` are figures, on the right. Cells cannot steer a
/// terminal.
pub(crate) fn aligned_table(header: &[&str], texts: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(header.to_vec());
    for row in rows {
        table.add_row(
            row.iter()
                .map(|cell| shown(cell).replace('\n', " "))
                .collect::<Vec<_>>(),
        );
    }
    for (number, name) in header.iter().enumerate() {
        if let Some(column) = table.column_mut(number).filter(|_| !texts.contains(name)) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines = table.to_string();
    let lines = lines.lines().map(str::trim_end);
    lines.collect::<Vec<_>>().join("\n") + "\n"
}
