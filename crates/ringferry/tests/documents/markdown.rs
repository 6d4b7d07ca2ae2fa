//! As much of Markdown as the tests need: lines of prose without code, code blocks, headings and links.

/// A code block: the word behind its fence (empty for an indented block), and its lines without the indentation.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    pub language: String,
    pub first_line: usize,
    pub lines: Vec<String>,
}

/// A link, and the number of the line that it is in.
#[derive(Debug, PartialEq, Eq)]
pub struct Link {
    pub line: usize,
    pub target: String,
}

/// The links, headings and code blocks of a page.
#[derive(Debug, Default)]
pub struct Page {
    pub blocks: Vec<Block>,
    /// Anchors of the headings as GitHub makes them.
    pub anchors: Vec<String>,
    pub links: Vec<Link>,
    /// The lines that are neither code nor empty, with their numbers.
    pub prose: Vec<(usize, String)>,
}

impl Page {
    pub fn parse(text: &str) -> Page {
        let mut page = Page::default();
        let mut fence: Option<Block> = None;
        // Indented lines are code only after an empty line, and never inside a list.
        let (mut after_empty, mut in_list) = (true, false);
        for (number, line) in text.lines().enumerate().map(|(at, line)| (at + 1, line)) {
            if let Some(word) = line.trim_start().strip_prefix("```") {
                match fence.take() {
                    Some(block) => page.blocks.push(block),
                    None => {
                        let language = word.trim().to_owned();
                        fence = Some(Block { language, first_line: number + 1, lines: Vec::new() });
                    }
                }
                continue;
            }
            if let Some(block) = &mut fence {
                block.lines.push(line.to_owned());
                continue;
            }
            if line.trim().is_empty() {
                after_empty = true;
                continue;
            }
            if !line.starts_with(' ') {
                in_list = line.starts_with("- ")
                    || line.split_once(". ").is_some_and(|(n, _)| n.parse::<u8>().is_ok());
            }
            let indented = line.strip_prefix("    ").filter(|_| !in_list);
            let continued =
                page.blocks.last().is_some_and(|block| block.first_line + block.lines.len() == number);
            match indented {
                Some(code) if after_empty || continued => {
                    match page.blocks.last_mut().filter(|_| continued) {
                        Some(block) => block.lines.push(code.to_owned()),
                        None => page.blocks.push(Block {
                            language: String::new(),
                            first_line: number,
                            lines: vec![code.to_owned()],
                        }),
                    }
                }
                _ => {
                    if let Some(heading) = heading(line) {
                        page.add_anchor(heading);
                    }
                    page.links.extend(links(&without_code(line)).map(|target| Link { line: number, target }));
                    page.prose.push((number, line.to_owned()));
                }
            }
            after_empty = false;
        }
        assert!(fence.is_none(), "a code fence is not closed");
        page
    }

    fn add_anchor(&mut self, heading: &str) {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let name: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>().to_lowercase();
        let again = self.anchors.iter().filter(|anchor| **anchor == name).count();
        self.anchors.push(if again == 0 { name } else { format!("{name}-{again}") });
    }
}

/// The text of a heading, without its `#`.
fn heading(line: &str) -> Option<&str> {
    let rest = line.trim_start_matches('#');
    (line.len() != rest.len()).then(|| rest.strip_prefix(' ')).flatten().map(str::trim)
}

/// The line with its code spans taken out.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// Targets of `[text](target)` and of `[name]: target`.
fn links(line: &str) -> impl Iterator<Item = String> {
    let defined =
        line.strip_prefix('[').and_then(|rest| rest.split_once("]: ")).map(|(_, target)| target.trim());
    let inline = line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    inline.chain(defined).map(str::to_owned).collect::<Vec<_>>().into_iter()
}

#[test]
fn a_page_is_taken_apart() {
    let page = Page::parse(
        "# A `page` of ours!\n\nSee [this](a.md#x-y), `[not](this)` and [that][1].\n\n    indented --code\n\n- item\n\n      \
         [in](list.md)\n\n## Same\n```sh\nfenced\n```\n## Same\n[1]: https://example.org/\ntext\n    no code\n",
    );
    assert_eq!(page.anchors, ["a-page-of-ours", "same", "same-1"]);
    let targets: Vec<_> = page.links.iter().map(|link| (link.line, link.target.as_str())).collect();
    assert_eq!(targets, [(3, "a.md#x-y"), (9, "list.md"), (16, "https://example.org/")]);
    let blocks: Vec<_> =
        page.blocks.iter().map(|b| (b.language.as_str(), b.first_line, b.lines.join("\n"))).collect();
    assert_eq!(blocks, [("", 5, "indented --code".into()), ("sh", 13, "fenced".into())]);
    assert_eq!(page.prose.last().unwrap(), &(18, "    no code".to_owned()));
}
