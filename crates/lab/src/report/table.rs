//! Columns of text.

/// Cells in rows; the first row is the header.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with a header.
    pub fn new(header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(|cell| (*cell).to_owned()).collect()] }
    }

    /// Adds a row.
    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Whether there is nothing but the header.
    pub fn is_empty(&self) -> bool {
        self.rows.len() < 2
    }

    /// The lines, indented by two; columns without any content are left out. Numbers, and what begins
    /// like one, stand to the right.
    pub fn draw(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
        let shown: Vec<(usize, usize, bool)> = (0..columns)
            .filter(|column| self.rows[1..].iter().any(|row| !cell(row, *column).is_empty()))
            .map(|column| {
                let width = self.rows.iter().map(|row| cell(row, column).chars().count()).max();
                let right = self.rows[1..].iter().all(|row| numeric(&cell(row, column)));
                (column, width.unwrap_or(0), right)
            })
            .collect();
        let mut out = String::new();
        for row in &self.rows {
            let mut line = String::from(" ");
            for &(column, width, right) in &shown {
                let text = cell(row, column);
                line.push(' ');
                line.push_str(&if right { format!("{text:>width$}") } else { format!("{text:<width$}") });
                line.push(' ');
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

fn numeric(cell: &str) -> bool {
    cell.is_empty() || cell.starts_with(|first: char| first.is_ascii_digit() || "+-".contains(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_empty_ones_left_out() {
        let mut table = Table::new(&["name", "value", "note", "nothing"]);
        table.push(vec!["a".into(), "1.5".into(), "x".into(), String::new()]);
        table.push(vec!["long name".into(), "-12".into()]);
        assert_eq!(table.draw(), "  name       value  note\n  a            1.5  x\n  long name    -12\n");
        assert!(!table.is_empty() && Table::new(&["a"]).is_empty());
    }
}
