//! Where the ranks of this machine are in the world of one round, and where they meet.

use sconce_collectives::environment::{SCONCE_STORE_ADDR, SCONCE_STORE_SECRET};

/// The place of this machine's ranks among all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// The run's name, which all its rounds have in common.
    pub(super) run_id: String,
    /// The number of this round, from 0: a run has more than one where ranks are started again.
    pub(super) round: usize,
    /// How many rounds before this one ended by a failure.
    pub(super) restarts: usize,
    /// The number of this machine.
    pub(super) machine: usize,
    /// How many machines there are.
    pub(super) machines: usize,
    /// How many ranks this machine has, as every other.
    pub(super) local_ranks: usize,
    /// Where rank 0 may listen: MASTER_ADDR.
    pub(super) main_address: String,
    /// MASTER_PORT.
    pub(super) main_port: u16,
    /// Where the ranks meet; none where rank 0 is to host the store itself.
    pub(super) store: Option<RanksStore>,
}

/// The address and the secret of the ranks' rendezvous store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RanksStore {
    pub(super) address: String,
    pub(super) secret: String,
}

impl Place {
    /// The number of ranks on all machines.
    pub(super) fn world_size(&self) -> usize {
        self.machines * self.local_ranks
    }

    /// The number in the world of a rank of this machine.
    pub(super) fn rank(&self, local_rank: usize) -> usize {
        self.machine * self.local_ranks + local_rank
    }

    /// The variables of torchrun that all ranks of this machine have in common, and the way to the store.
    pub(super) fn variables(&self, role: &str, max_restarts: usize) -> Vec<(&'static str, String)> {
        let (world, local) = (self.world_size().to_string(), self.local_ranks.to_string());
        let machine = self.machine.to_string();
        let mut variables = vec![
            ("WORLD_SIZE", world.clone()),
            ("LOCAL_WORLD_SIZE", local),
            ("GROUP_RANK", machine.clone()),
            ("GROUP_WORLD_SIZE", self.machines.to_string()),
            ("ROLE_NAME", role.to_owned()),
            ("ROLE_WORLD_SIZE", world),
            ("NODE_RANK", machine),
            ("MASTER_ADDR", self.main_address.clone()),
            ("MASTER_PORT", self.main_port.to_string()),
            ("TORCHELASTIC_RUN_ID", self.run_id.clone()),
            ("TORCHELASTIC_RESTART_COUNT", self.restarts.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", max_restarts.to_string()),
            // Nobody listens at MASTER_PORT before rank 0 does.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
        ];
        if let Some(store) = &self.store {
            variables.push((SCONCE_STORE_ADDR, store.address.clone()));
            variables.push((SCONCE_STORE_SECRET, store.secret.clone()));
        }
        variables
    }

    /// The variables of one rank.
    pub(super) fn variables_of(&self, local_rank: usize) -> [(&'static str, String); 3] {
        let rank = self.rank(local_rank).to_string();
        [
            ("RANK", rank.clone()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("ROLE_RANK", rank),
        ]
    }
}
