//! A table of text: columns as wide as their widest cell, the first to the left, numbers to the right.

/// Rows of cells under a header.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column titles and no rows.
    pub fn new(header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(|&title| title.into()).collect()] }
    }

    /// Adds a row. Missing cells stay empty.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The table as lines, with a rule under the header.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        // Characters, not bytes: "µs" is two wide.
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for (index, row) in self.rows.iter().enumerate() {
            let cell = |column: usize| row.get(column).map_or("", String::as_str);
            let cells = widths.iter().enumerate().map(|(column, &width)| match column {
                0 => format!("{:<width$}", cell(column)),
                _ => format!("{:>width$}", cell(column)),
            });
            text += cells.collect::<Vec<_>>().join("  ").trim_end();
            text.push('\n');
            if index == 0 {
                let rule: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
                text += &rule.join("  ");
                text.push('\n');
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_for_any_text() {
        let mut table = Table::new(&["test", "rate", "p50"]);
        table.row(vec!["TCP".into(), "9.41 Gbit/s".into(), "12.3 µs".into()]);
        table.row(vec!["a longer name".into(), "-".into()]);
        let expected = "\
test                  rate      p50
-------------  -----------  -------
TCP            9.41 Gbit/s  12.3 µs
a longer name            -
";
        assert_eq!(table.render(), expected);
    }
}
