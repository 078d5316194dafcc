//! How many ranks a check is run with.

use std::num::NonZeroUsize;
use std::str::FromStr;

use crate::device::Devices;

/// Most ranks that devices drawn by the host's cores are shared by.
const SOFTWARE: usize = 4;

/// What `--ranks` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ranks {
    /// A rank for each device, and fewer.
    All,
    Only(NonZeroUsize),
}

impl FromStr for Ranks {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Self::All),
            _ => text.parse().map(Self::Only).map_err(|_| "expected 'all' or a number from 1"),
        }
    }
}

impl Ranks {
    /// The numbers of ranks to try, rising. Ranks share devices drawn in software, and others if told so.
    pub(crate) fn counts(self, devices: &Devices) -> Vec<usize> {
        match self {
            Self::Only(ranks) => vec![ranks.get()],
            Self::All if devices.are_software() => up_to(SOFTWARE),
            Self::All => up_to(devices.names.len()),
        }
    }
}

/// 1, 2, 4 and so on, and `all`.
fn up_to(all: usize) -> Vec<usize> {
    let doubled = std::iter::successors(Some(1), |ranks| Some(ranks * 2));
    doubled.take_while(|&ranks| ranks < all).chain([all.max(1)]).collect()
}

#[cfg(test)]
mod tests {
    use super::{Ranks, up_to};
    use crate::device::Devices;

    fn named(name: &str, count: usize) -> Devices {
        Devices { names: vec![name.to_owned(); count], ..Devices::default() }
    }

    #[test]
    fn ranks_double_up_to_all() {
        assert_eq!(up_to(0), [1]);
        assert_eq!(up_to(1), [1]);
        assert_eq!(up_to(2), [1, 2]);
        assert_eq!(up_to(3), [1, 2, 3]);
        assert_eq!(up_to(8), [1, 2, 4, 8]);
    }

    #[test]
    fn all_is_a_rank_for_each_gpu_and_four_in_software() {
        assert_eq!(Ranks::All.counts(&named("NVIDIA H100", 2)), [1, 2]);
        assert_eq!(Ranks::All.counts(&named("llvmpipe", 1)), [1, 2, 4]);
        assert_eq!("3".parse::<Ranks>().unwrap().counts(&named("NVIDIA H100", 2)), [3]);
    }

    #[test]
    fn ranks_are_all_or_a_number_from_one() {
        assert_eq!("all".parse(), Ok(Ranks::All));
        for text in ["0", "-1", "some", ""] {
            assert!(text.parse::<Ranks>().is_err(), "{text}");
        }
    }
}
