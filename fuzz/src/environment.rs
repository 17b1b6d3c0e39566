//! The environment of a rank: any variables make a world and a run, or an error.

use std::collections::HashMap;

use sconce_core::{AcceleratorBuilder, World, environment as variable};

/// Reads lines of `NAME=value` as an environment.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let variables: HashMap<&str, &str> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let lookup = |name: &str| {
        // Else any file of this machine could be read.
        let is_file = name == variable::ACCELERATE_DEEPSPEED_CONFIG_FILE;
        let value = variables.get(name).filter(|_| !is_file)?;
        Some((*value).to_owned())
    };
    let size = match World::from_lookup(lookup) {
        Ok(world) => {
            assert!(world.rank < world.size, "{world:?}");
            assert!(world.local_rank < world.local_size, "{world:?}");
            assert!(world.local_size <= world.size, "{world:?}");
            assert!(world.master_port != 0, "{world:?}");
            world.size
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            2
        }
    };
    match AcceleratorBuilder::default().settings(size, lookup) {
        Ok(settings) => assert!(settings.batch.accumulation_steps > 0, "{settings:?}"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
