//! `--gpu_ids`: which of a host's GPUs the ranks may use.
//!
//! As in Accelerate, the numbers become `CUDA_VISIBLE_DEVICES`, and a rank then counts from 0 among them. What can be told
//! without CUDA is told here, once; whether there is a GPU of that number only the ranks find out.

use std::fmt;
use std::str::FromStr;

use super::arguments::Arguments;
use crate::command_error::CommandError;
use sconce_core::DeviceRequest;
use sconce_core::environment::SCONCE_DEVICE;

/// The GPUs that the driver shows to a process, in the order in which the process counts them. Read by the driver.
pub(super) const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// GPUs that were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum GpuIds {
    /// All that the launcher itself may use.
    All,
    /// Those of these numbers, in this order.
    Listed(Vec<usize>),
}

impl FromStr for GpuIds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().eq_ignore_ascii_case("all") {
            return Ok(Self::All);
        }
        let mut ids = Vec::new();
        for word in text.split(',').map(str::trim) {
            // `parse` alone would take `+1`.
            let is_number = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
            let id = word.parse().ok().filter(|_| is_number);
            let id = id.ok_or_else(|| {
                format!("`{word}` is not the number of a GPU; expected numbers from 0 with commas between, or all")
            })?;
            if ids.contains(&id) {
                return Err(format!("GPU {id} is named twice; each rank has a GPU of its own"));
            }
            ids.push(id);
        }
        Ok(Self::Listed(ids))
    }
}

impl fmt::Display for GpuIds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => formatter.write_str("all"),
            Self::Listed(ids) => {
                let numbers = Vec::from_iter(ids.iter().map(usize::to_string));
                formatter.write_str(&numbers.join(","))
            }
        }
    }
}

/// Checks what the ranks are asked to compute on against the GPUs that they are given.
///
/// `ranks_per_host` is how many ranks some host has, where the launcher knows; `lookup` is the environment of the ranks.
///
/// # Errors
/// A device that no rank could open, and fewer GPUs than ranks that need one each.
pub(super) fn check(
    arguments: &Arguments,
    ranks_per_host: Option<usize>,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<(), CommandError> {
    let request = DeviceRequest::from_lookup(lookup).map_err(CommandError::usage)?;
    let Some(GpuIds::Listed(ids)) = &arguments.gpu_ids else {
        return Ok(());
    };
    if arguments.cpu {
        let error = CommandError::usage("--gpu_ids has no effect with --cpu");
        return Err(error.hint("the ranks compute on the CPU; leave one of the two out"));
    }
    match (request, ranks_per_host) {
        (DeviceRequest::Gpu(number), _) if number >= ids.len() => {
            let error = CommandError::usage(format!(
                "{SCONCE_DEVICE}={request} is not among the {} of --gpu_ids",
                gpus(ids.len())
            ));
            Err(error.hint("ranks count from 0 among the GPUs that are listed, in that order"))
        }
        // They have that GPU in common.
        (DeviceRequest::Gpu(_), _) => Ok(()),
        (_, Some(ranks)) if ranks > ids.len() => {
            let listed = gpus(ids.len());
            let error = CommandError::usage(format!("--gpu_ids names {listed} for {ranks} ranks of a host"));
            Err(error.hint(format!(
                "name one for each rank, or start fewer ranks; {SCONCE_DEVICE}=cuda:0 lets ranks have one in common"
            )))
        }
        _ => Ok(()),
    }
}

fn gpus(count: usize) -> String {
    format!("{count} GPU{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_order_and_all_is_a_word() {
        assert_eq!("2, 0,11".parse(), Ok(GpuIds::Listed(vec![2, 0, 11])));
        assert_eq!("2, 0,11".parse::<GpuIds>().unwrap().to_string(), "2,0,11");
        assert_eq!("All".parse(), Ok(GpuIds::All));
    }

    #[test]
    fn what_is_no_list_of_different_numbers_is_refused_by_word() {
        for (text, word) in [
            ("", "``"),
            ("0,", "``"),
            ("0,-1", "`-1`"),
            ("+1", "`+1`"),
            ("0,x", "`x`"),
            ("0;1", "`0;1`"),
            ("99999999999999999999", "`99999999999999999999`"),
            ("1,0,01", "GPU 1 is named twice"),
        ] {
            let message = text.parse::<GpuIds>().unwrap_err();
            assert!(message.contains(word), "{text}: {message}");
        }
    }
}
