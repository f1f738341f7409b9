//! How fast each kernel is: `cargo bench -p chela-kernels`; `-- attention` runs only the group of that name.
//!
//! Each kernel is timed in turn with the plain loops of the tests, and its rate is given beside what
//! this machine multiplies or reads at best. README.md beside this folder says how to read it.
#![allow(clippy::print_stdout)]

mod attention;
mod head;
mod measure;
mod products;
mod rows;
mod step;

/// The plain loops of the tests, with the words they know.
#[allow(dead_code, reason = "not every kernel is timed beside its plain loop")]
#[path = "../../src/reference.rs"]
mod reference;

mod dtype {
    pub(crate) use chela_kernels::DType;
}
mod ops {
    pub(crate) use chela_kernels::{Activation, AdamW, Heads, Norm, Rope, Routing};
}
mod segments {
    pub(crate) use chela_kernels::Segment;
}

use chela_kernels::{Cpu, Kernels, Priority, Result};

use measure::Bench;

/// A group of benchmarks.
type Group = fn(&Bench) -> Result;

const GROUPS: [(&str, Group); 7] = [
    ("few", products::few_rows),
    ("many", products::many_rows),
    ("lora", products::lora),
    ("attention", attention::attention),
    ("rows", rows::rows),
    ("head", head::head),
    ("decode", step::decode),
];

fn main() -> Result {
    // Cargo adds `--bench`; what else stands there names groups.
    let only: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    if let Some(unknown) = only
        .iter()
        .find(|arg| GROUPS.iter().all(|(name, _)| arg != name))
    {
        let names = GROUPS.map(|(name, _)| name).join(", ");
        println!("no group {unknown}; there are: {names}");
        return Ok(());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut counts = vec![1, cores];
    counts.dedup();
    for threads in counts {
        let cpu = Cpu::new(threads).with_priority(Priority::Train);
        println!("== {}", cpu.describe());
        for (name, group) in GROUPS {
            if only.is_empty() || only.iter().any(|one| one == name) {
                // Measured anew for each group: a busy machine's rates drift.
                group(&Bench::new(&cpu, name)?)?;
            }
        }
    }
    Ok(())
}
