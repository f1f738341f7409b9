//! How the machine's memory is divided before anything is served: stated once, and kept by whoever spends it.

use chela_core::EngineError;
use chela_model::ModelConfig;

const MIB: usize = 1 << 20;

/// Bytes of each part. Weights and optimizer take what they take; the others are limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Of the machine, or of the control group that confines this process; `None` where the system does not tell.
    pub machine: Option<usize>,
    /// The base model, shared by serving and learning.
    pub base: usize,
    /// Keys and values: of running requests, and with what they leave, of kept prefixes. One text alone may exceed it.
    pub cache: usize,
    /// Adapters, and whole models that were trained, that no request uses.
    pub adapters: usize,
    /// What a learner keeps for the way back.
    pub activations: usize,
    /// What one learner trains, its gradient and two moments.
    pub optimizer: usize,
}

/// What whoever starts the engine asks for; 0 = what the machine has room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// See [`MemoryPlan::cache`].
    pub cache: usize,
    /// See [`MemoryPlan::adapters`].
    pub adapters: usize,
    /// See [`MemoryPlan::activations`].
    pub activations: usize,
}

impl MemoryPlan {
    /// Divides a machine's memory. What was asked for is given or refused, what was not is made to fit; a gate reads two versions in
    /// turn, so there is room for two of `version` bytes, if for any.
    pub fn new(
        machine: Option<usize>,
        (base, optimizer, version): (usize, usize, usize),
        asked: Asked,
    ) -> Result<Self, EngineError> {
        let part = |of: usize, least: usize, most: usize, unknown: usize| {
            machine.map_or(unknown, |m| (m / of).clamp(least, most))
        };
        let wants = [
            part(4, 0, usize::MAX, 1 << 30),
            part(16, 256 * MIB, usize::MAX, 256 * MIB).max(2 * version),
            part(4, 0, 4 << 30, 4 << 30),
        ];
        let parts = [asked.cache, asked.adapters, asked.activations];
        let sum = |all: [usize; 3]| all.into_iter().fold(0, usize::saturating_add);
        let fixed = sum(parts).saturating_add(base + optimizer);
        if let Some(machine) = machine
            && fixed > machine
            && sum(parts) > 0
        {
            return Err(EngineError::Memory(format!(
                "weights ({}) and optimizer ({}), with what was asked for cached keys and values ({}), adapters ({}) and activations ({}), \
                 are {} and this machine has {}: ask for less, or for 0 to have them made to fit",
                mib(base),
                mib(optimizer),
                mib(asked.cache),
                mib(asked.adapters),
                mib(asked.activations),
                mib(fixed),
                mib(machine),
            )));
        }
        // Activations first and whole where they can be: steps are cut by them, and should not change with the rest.
        let mut left = machine.map_or(usize::MAX, |m| m.saturating_sub(fixed));
        let mut give = |asked: usize, want: usize, share: f64| {
            if asked > 0 {
                return asked;
            }
            let given = want.min((left as f64 * share) as usize);
            left -= given;
            given
        };
        let activations = give(asked.activations, wants[2], 0.5);
        let adapters = give(asked.adapters, wants[1], 0.25);
        let cache = give(asked.cache, wants[0], 1.0);
        Ok(Self {
            machine,
            base,
            cache,
            adapters,
            activations,
            optimizer,
        })
    }

    /// Each part by its name in `/metrics`.
    pub fn parts(&self) -> [(&'static str, usize); 5] {
        [
            ("base", self.base),
            ("cache", self.cache),
            ("adapters", self.adapters),
            ("activations", self.activations),
            ("optimizer", self.optimizer),
        ]
    }

    /// All parts together.
    pub fn total(&self) -> usize {
        let bytes = self.parts().into_iter().map(|(_, bytes)| bytes);
        bytes.fold(0, usize::saturating_add)
    }
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "memory: base weights {}, cached keys and values up to {}, adapters up to {}, activations of training up to {}, \
             optimizer {}; together {}",
            mib(self.base),
            mib(self.cache),
            mib(self.adapters),
            mib(self.activations),
            mib(self.optimizer),
            mib(self.total()),
        )?;
        match self.machine {
            Some(machine) => write!(f, " of {}", mib(machine)),
            None => Ok(()),
        }
    }
}

/// Bytes of a learner of all weights, and of one version that it makes. It holds the weights, their gradient and two moments, and the
/// weights once more as passes read them, all in f32.
pub fn whole(config: &ModelConfig) -> (usize, usize) {
    let version = 4 * config.parameters() as usize;
    (5 * version, version)
}

/// Refuses a learner of all weights that this machine has no memory for, beside the base model and the version that is served.
pub fn room_for_whole(
    machine: Option<usize>,
    base: usize,
    config: &ModelConfig,
) -> Result<(), EngineError> {
    let (learner, version) = whole(config);
    let needs = base + learner + version;
    match machine {
        Some(machine) if needs > machine => Err(EngineError::Memory(format!(
            "training all {} weights takes {}: {} for weights, gradient and two moments in f32, {} for the version that is served, {} for the \
             base model; this machine has {}: set learning.weights = \"lora\", or take a smaller model",
            config.parameters(),
            mib(needs),
            mib(learner),
            mib(version),
            mib(base),
            mib(machine),
        ))),
        _ => Ok(()),
    }
}

fn mib(bytes: usize) -> String {
    format!("{} MiB", bytes.div_ceil(MIB))
}

/// Bytes that this process may use: the machine's, or fewer where a control group confines it.
pub fn machine() -> Option<usize> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kib: usize = line.split_whitespace().next()?.parse().ok()?;
    let confined = [
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ]
    .iter()
    .filter_map(|path| {
        std::fs::read_to_string(path)
            .ok()?
            .trim()
            .parse::<usize>()
            .ok()
    });
    confined.chain([kib * 1024]).min()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const GIB: usize = 1 << 30;

    #[test]
    fn what_was_not_asked_for_is_made_to_fit() {
        let plan = |machine, base, asked| MemoryPlan::new(machine, (base, 0, 0), asked).unwrap();
        let ample = plan(Some(32 * GIB), GIB, Asked::default());
        assert_eq!((ample.cache, ample.adapters), (8 * GIB, 2 * GIB));
        assert_eq!((ample.activations, ample.total()), (4 * GIB, 15 * GIB));
        let unknown = plan(None, 5 * GIB, Asked::default());
        assert_eq!((unknown.cache, unknown.adapters), (GIB, GIB / 4));
        let tight = plan(Some(8 * GIB), 6 * GIB, Asked::default());
        assert!(
            tight.total() <= 8 * GIB && tight.cache >= GIB / 2,
            "{tight}"
        );
        let asked = Asked {
            cache: GIB,
            ..Asked::default()
        };
        let beside = plan(Some(8 * GIB), 6 * GIB, asked);
        assert!(beside.cache == GIB && beside.total() <= 8 * GIB, "{beside}");
        // A base model that the system pages in and out is not refused; nothing is left for the rest.
        let paged = plan(Some(4 * GIB), 5 * GIB, Asked::default());
        assert_eq!((paged.cache, paged.activations), (0, 0));
    }

    #[test]
    fn what_was_asked_for_and_does_not_fit_is_refused_with_the_numbers() {
        let asked = Asked {
            cache: 7 * GIB,
            ..Asked::default()
        };
        let refused = MemoryPlan::new(Some(8 * GIB), (GIB, 10 * MIB, 0), asked).unwrap_err();
        let says = refused.to_string();
        for part in ["1024 MiB", "10 MiB", "7168 MiB", "8202 MiB", "has 8192 MiB"] {
            assert!(says.contains(part), "{says}");
        }
    }

    #[test]
    fn a_learner_of_all_weights_is_refused_with_the_numbers() {
        let config = chela_model::testing::TinySpec::default().config();
        let (learner, version) = whole(&config);
        assert_eq!(learner, 20 * config.parameters() as usize);
        let needs = 7 * MIB + learner + version;
        assert!(room_for_whole(Some(needs), 7 * MIB, &config).is_ok());
        assert!(room_for_whole(None, 7 * MIB, &config).is_ok());
        let refused = room_for_whole(Some(needs - MIB), 7 * MIB, &config);
        let says = refused.unwrap_err().to_string();
        for part in [
            mib(needs),
            mib(learner),
            "7 MiB".to_owned(),
            mib(needs - MIB),
        ] {
            assert!(says.contains(&part), "{part}: {says}");
        }
        assert!(says.contains("learning.weights = \"lora\""), "{says}");
        // Where there is room, two versions of it stay in memory.
        let plan = MemoryPlan::new(Some(32 * GIB), (GIB, 10 * GIB, 2 * GIB), Asked::default());
        assert_eq!(plan.unwrap().adapters, 4 * GIB);
    }

    #[test]
    fn it_says_every_part() {
        let plan = MemoryPlan::new(Some(32 * GIB), (GIB, 10 * MIB, 0), Asked::default()).unwrap();
        assert_eq!(
            plan.to_string(),
            "memory: base weights 1024 MiB, cached keys and values up to 8192 MiB, adapters up to 2048 MiB, \
             activations of training up to 4096 MiB, optimizer 10 MiB; together 15370 MiB of 32768 MiB"
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_has_memory() {
        assert!(machine().unwrap() > 64 * MIB);
    }
}
