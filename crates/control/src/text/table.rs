//! Columns of text, as wide as their widest cell.

use std::fmt;

/// The space between two columns.
const GAP: &str = "  ";

/// Rows of cells under headings. A heading starts with `<` for a column aligned left and `>` for one aligned right.
#[derive(Clone, Debug)]
pub struct Table {
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
    ruled: bool,
}

impl Table {
    /// A table of no rows yet, under these headings.
    pub fn new(headings: &[&str]) -> Table {
        Table {
            right: headings.iter().map(|heading| heading.starts_with('>')).collect(),
            rows: vec![headings.iter().map(|heading| heading[1..].to_owned()).collect()],
            ruled: false,
        }
    }

    /// Draws a line under the headings.
    #[must_use]
    pub fn ruled(self) -> Table {
        Table { ruled: true, ..self }
    }

    /// Adds a row. Cells that are missing at its end stay empty; there are no more of them than headings.
    pub fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }

    /// Whether there is nothing but the headings.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Characters, not bytes: "µs" is two wide.
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
        };
        let widths: Vec<_> = (0..self.right.len()).map(width).collect();
        for (number, row) in self.rows.iter().enumerate() {
            let cells = widths.iter().zip(&self.right).enumerate().map(|(column, (&width, &right))| {
                let cell = row.get(column).map_or("", String::as_str);
                if right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join(GAP).trim_end())?;
            if number == 0 && self.ruled {
                let rule: Vec<_> = widths.iter().map(|&width| "-".repeat(width)).collect();
                writeln!(f, "{}", rule.join(GAP))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_for_any_text() {
        let mut table = Table::new(&["<test", ">rate", ">p50"]).ruled();
        table.row(["TCP", "9.41 Gbit/s", "12.3 µs"].map(str::to_owned));
        table.row(["a longer name", "-"].map(str::to_owned));
        let expected = "\
test                  rate      p50
-------------  -----------  -------
TCP            9.41 Gbit/s  12.3 µs
a longer name            -
";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn a_table_without_rows_has_its_headings() {
        let table = Table::new(&["<MAC", ">AGE"]);
        assert!(table.is_empty());
        assert_eq!(table.to_string(), "MAC  AGE\n");
    }
}
