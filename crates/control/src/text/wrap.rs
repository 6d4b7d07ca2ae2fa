//! Long lines for a terminal of this width.

/// Breaks lines at spaces where they are longer than `width` columns. What follows a break stands below the text that it belongs to: behind a number ("1. "), or
/// behind the last column of a table that begins in the left half.
pub fn wrap(text: &str, width: usize) -> String {
    let mut all = String::with_capacity(text.len() + text.len() / 16);
    for line in text.split_inclusive('\n') {
        let (line, end) = line.strip_suffix('\n').map_or((line, ""), |line| (line, "\n"));
        wrap_line(line, width, &mut all);
        all.push_str(end);
    }
    all
}

fn wrap_line(line: &str, width: usize, all: &mut String) {
    let hang = hanging(line, width);
    let (mut rest, mut indent) = (line, 0);
    // Each character takes one column; those that take two break a line late, and nothing else happens.
    while indent + rest.chars().count() > width {
        let room = width.saturating_sub(indent);
        let end = rest.char_indices().nth(room).map_or(rest.len(), |(at, _)| at);
        let first = if indent == 0 { rest.char_indices().nth(hang).map_or(0, |(at, _)| at) } else { 0 };
        let fits = rest[..end].rfind(' ').filter(|at| *at > first);
        // A word that is longer than a line is not broken: it may be a command to be copied.
        let Some(at) = fits.or_else(|| rest[end..].find(' ').map(|at| end + at)) else { break };
        all.push_str(rest[..at].trim_end());
        all.push('\n');
        all.extend(std::iter::repeat_n(' ', hang));
        (rest, indent) = (rest[at..].trim_start(), hang);
    }
    all.push_str(rest);
}

/// Returns the column below which a line goes on.
fn hanging(line: &str, width: usize) -> usize {
    let spaces = line.len() - line.trim_start_matches(' ').len();
    let number = line[spaces..].split_once(". ").filter(|(number, _)| number.parse::<u32>().is_ok());
    let number = number.map_or(0, |(number, _)| number.len() + 2);
    let left: String = line.chars().take(width / 2).collect();
    let column = left.rfind("  ").map_or(0, |at| left[..at].chars().count() + 2);
    column.max(spaces + number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_at_spaces_and_go_on_below_their_text() {
        let text = "vm0, measured over the last 10 s\n\n1. A long sentence about it. [nothing passes]\n   What to do: Mend it.\n";
        let expected = "\
vm0, measured over the
last 10 s

1. A long sentence
   about it. [nothing
   passes]
   What to do: Mend it.
";
        assert_eq!(wrap(text, 23), expected);
        assert_eq!(wrap(text, 200), text);
        assert_eq!(
            wrap("  vlan   passes  It is in VLAN 10 now.", 36),
            "  vlan   passes  It is in VLAN 10\n                 now."
        );
    }

    #[test]
    fn words_are_whole_and_narrow_terminals_are_no_trap() {
        let command = "`ringferry ctl set vm0 static_macs=52:54:00:00:00:01` holds";
        assert_eq!(wrap(command, 20), "`ringferry ctl set\nvm0\nstatic_macs=52:54:00:00:00:01`\nholds");
        for width in 0..40 {
            let wrapped = wrap("3. größer als ein 虚拟机, and  with columns of it", width);
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(
                words(&wrapped),
                words("3. größer als ein 虚拟机, and  with columns of it"),
                "{width}"
            );
        }
        assert_eq!(wrap("", 0), "");
    }
}
