//! Writes every seed to `corpus/TARGET/NAME`.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let seeds = ringferry_fuzz::seeds::all();
    for seed in &seeds {
        let folder = corpus.join(seed.target);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(seed.name), &seed.bytes)?;
    }
    println!("{} seeds in {}", seeds.len(), corpus.display());
    Ok(())
}
