//! Look-ahead: what is fetched early, what is kept, and what budgets allow.

use std::collections::BTreeMap;

use proptest::prelude::*;
use zero_core::{Accessed, Bytes, LookAhead, LookAheadOptions, LookAheadStatistics, ParameterIndex};

const UNLIMITED: LookAheadOptions =
    LookAheadOptions { lookahead_bytes: Bytes::new(u64::MAX), live_bytes: None, reuse_bytes: Bytes::ZERO };

fn index(parameter: usize) -> ParameterIndex {
    ParameterIndex::new(parameter)
}

fn numbers(parameters: &[ParameterIndex]) -> Vec<usize> {
    parameters.iter().map(|parameter| parameter.index()).collect()
}

/// Parameters of 10 bytes each.
fn tens(count: usize, options: LookAheadOptions) -> LookAhead {
    LookAhead::new(vec![Bytes::new(10); count], options)
}

/// Uses parameters one after another, each released before the next.
fn walk(schedule: &mut LookAhead, order: &[usize]) -> Vec<Accessed> {
    let use_one = |&parameter: &usize| {
        let accessed = schedule.access(index(parameter));
        schedule.release(index(parameter));
        accessed
    };
    order.iter().map(use_one).collect()
}

fn hits(accesses: &[Accessed]) -> Vec<bool> {
    accesses.iter().map(|accessed| accessed.hit).collect()
}

#[test]
fn nothing_is_fetched_early_in_the_first_round() {
    for accessed in walk(&mut tens(3, UNLIMITED), &[0, 1, 2, 2, 1, 0]) {
        assert_eq!(accessed, Accessed::default());
    }
}

#[test]
fn what_is_expected_next_is_fetched_in_order_up_to_the_budget() {
    let options = LookAheadOptions { lookahead_bytes: Bytes::new(25), ..UNLIMITED };
    let mut schedule = tens(5, options);
    walk(&mut schedule, &[0, 1, 2, 3, 4]);
    schedule.begin_round();
    let accesses = walk(&mut schedule, &[0, 1, 2, 3, 4]);
    let fetched: Vec<_> = accesses.iter().map(|accessed| numbers(&accessed.fetch)).collect();
    assert_eq!(fetched, [vec![1, 2], vec![3], vec![4], vec![], vec![]]);
    assert_eq!(hits(&accesses), [false, true, true, true, true]);
    assert!(accesses.iter().all(|accessed| accessed.evict.is_empty()));
    assert_eq!(schedule.statistics(), LookAheadStatistics { hits: 4, misses: 6, wasted: 0 });
}

#[test]
fn a_budget_of_zero_turns_look_ahead_off() {
    let mut schedule = tens(3, LookAheadOptions { lookahead_bytes: Bytes::ZERO, ..UNLIMITED });
    for _ in 0..2 {
        let accesses = walk(&mut schedule, &[0, 1, 2]);
        assert_eq!(accesses, vec![Accessed::default(); 3]);
        schedule.begin_round();
    }
}

#[test]
fn a_parameter_used_again_within_the_window_stays() {
    let mut schedule = tens(3, UNLIMITED);
    walk(&mut schedule, &[0, 1, 2, 1, 0]);
    schedule.begin_round();
    schedule.access(index(0));
    assert!(schedule.release(index(0)), "its second use has been looked at already");
    assert_eq!(hits(&walk(&mut schedule, &[1, 2, 1, 0])), [true; 4]);
    assert_eq!(schedule.live_bytes(), Bytes::ZERO);
}

#[test]
fn a_parameter_is_kept_if_its_next_use_is_near() {
    let keeps = |reuse| {
        let options =
            LookAheadOptions { lookahead_bytes: Bytes::ZERO, reuse_bytes: Bytes::new(reuse), ..UNLIMITED };
        let mut schedule = tens(3, options);
        walk(&mut schedule, &[0, 1, 2, 2, 1, 0]);
        schedule.begin_round();
        [0, 1, 2, 2, 1, 0].map(|parameter| {
            schedule.access(index(parameter));
            schedule.release(index(parameter))
        })
    };
    assert_eq!(keeps(0), [false; 6]);
    assert_eq!(keeps(1), [false, false, true, false, false, false]);
    assert_eq!(keeps(20), [false, false, true, false, false, false]);
    assert_eq!(keeps(21), [false, true, true, false, false, false]);
    assert_eq!(keeps(41), [true, true, true, false, false, false]);
}

#[test]
fn an_access_while_in_use_is_a_hit() {
    let mut schedule = tens(1, UNLIMITED);
    assert!(!schedule.access(index(0)).hit);
    assert!(schedule.access(index(0)).hit);
    assert!(!schedule.release(index(0)));
    assert!(!schedule.access(index(0)).hit);
}

#[test]
fn what_is_needed_is_served_beyond_the_budget_and_the_farthest_use_gives_way_first() {
    let options = LookAheadOptions { live_bytes: Some(Bytes::new(30)), ..UNLIMITED };
    let mut schedule = tens(6, options);
    walk(&mut schedule, &[0, 1, 2, 3, 4]);
    schedule.begin_round();
    assert_eq!(numbers(&schedule.access(index(0)).fetch), [1, 2]);
    // Not expected, and there is no room.
    let accessed = schedule.access(index(5));
    assert_eq!((accessed.hit, numbers(&accessed.evict), numbers(&accessed.fetch)), (false, vec![2], vec![]));
    let accessed = schedule.access(index(4));
    assert_eq!((accessed.hit, numbers(&accessed.evict), numbers(&accessed.fetch)), (false, vec![1], vec![]));
    let accessed = schedule.access(index(3));
    assert_eq!((accessed.hit, accessed.evict, accessed.fetch), (false, vec![], vec![]));
    assert_eq!(schedule.live_bytes(), Bytes::new(40));
    assert!(!schedule.release(index(3)));
    assert_eq!(schedule.statistics().wasted, 2);
}

#[test]
fn a_parameter_larger_than_the_budgets_is_served_and_does_not_hold_up_others() {
    for options in [
        LookAheadOptions { lookahead_bytes: Bytes::new(10), ..UNLIMITED },
        LookAheadOptions { live_bytes: Some(Bytes::new(30)), ..UNLIMITED },
    ] {
        let bytes = [10, 99, 10, 10].map(Bytes::new);
        let mut schedule = LookAhead::new(bytes.into(), options);
        walk(&mut schedule, &[0, 1, 2, 3]);
        schedule.begin_round();
        let accesses = walk(&mut schedule, &[0, 1, 2, 3]);
        assert_eq!(accesses[0].fetch[0], index(2));
        assert!(!accesses[1].hit);
        assert!(accesses[3].hit);
    }
}

#[test]
fn empty_parameters_are_fetched_like_others() {
    let options = LookAheadOptions {
        lookahead_bytes: Bytes::new(1),
        live_bytes: Some(Bytes::ZERO),
        reuse_bytes: Bytes::ZERO,
    };
    let mut schedule = LookAhead::new(vec![Bytes::ZERO; 3], options);
    walk(&mut schedule, &[0, 1, 2]);
    schedule.begin_round();
    assert_eq!(hits(&walk(&mut schedule, &[0, 1, 2])), [false, true, true]);
}

#[test]
fn parts_that_are_left_out_are_skipped() {
    let mut schedule = tens(9, LookAheadOptions { lookahead_bytes: Bytes::new(30), ..UNLIMITED });
    walk(&mut schedule, &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
    schedule.begin_round();
    let accesses = walk(&mut schedule, &[0, 3, 4, 5, 6, 7, 8]);
    // While 3 and 4 come, 1 is still waited for; with 5 it is clear that it will not come.
    assert_eq!(hits(&accesses), [false, true, false, false, true, true, true]);
    let evicted: Vec<_> = accesses.iter().map(|accessed| numbers(&accessed.evict)).collect();
    assert_eq!(evicted, [vec![], vec![], vec![], vec![1, 2, 3], vec![], vec![], vec![]]);
    assert_eq!(numbers(&accesses[3].fetch), [6, 7, 8]);
}

#[test]
fn single_accesses_that_were_not_expected_change_nothing() {
    let mut schedule = tens(6, UNLIMITED);
    walk(&mut schedule, &[0, 1, 2, 3, 4]);
    schedule.begin_round();
    let accesses = walk(&mut schedule, &[0, 5, 1, 4, 0, 2, 3, 4]);
    assert_eq!(hits(&accesses), [false, false, true, true, false, true, true, true]);
    assert!(accesses.iter().all(|accessed| accessed.evict.is_empty()));
}

#[test]
fn more_repetitions_than_were_recorded_are_predicted_from_the_beginning() {
    let mut schedule = tens(3, UNLIMITED);
    walk(&mut schedule, &[0, 1, 2]);
    schedule.begin_round();
    let accesses = walk(&mut schedule, &[0, 1, 2, 0, 1, 2]);
    assert_eq!(hits(&accesses), [false, true, true, false, true, true]);
}

#[test]
fn a_pass_that_is_left_out_is_noticed_in_the_other_direction() {
    let (forward, backward) = ([0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]);
    let mut schedule = tens(8, LookAheadOptions { lookahead_bytes: Bytes::new(10), ..UNLIMITED });
    walk(&mut schedule, &[forward, forward, backward].concat());
    schedule.begin_round();
    walk(&mut schedule, &forward);
    let accesses = walk(&mut schedule, &backward);
    assert_eq!(hits(&accesses), [false, false, false, false, true, true, true, true]);
}

#[test]
fn single_changes_of_the_order_cost_little() {
    let passes = |count| (0..count).flat_map(|_| (0..100).chain((0..100).rev()));
    let mut schedule = tens(110, LookAheadOptions { lookahead_bytes: Bytes::new(200), ..UNLIMITED });
    walk(&mut schedule, &passes(5).collect::<Vec<_>>());
    schedule.begin_round();
    // In 50 places something else is used.
    let changed = passes(5).enumerate().map(|(at, parameter)| match at % 20 {
        7 => (at * 37) % 110,
        _ => parameter,
    });
    let accesses = walk(&mut schedule, &changed.collect::<Vec<_>>());
    let misses = accesses.iter().filter(|accessed| !accessed.hit).count();
    assert!(misses <= 1 + 50 && schedule.statistics().wasted <= 50, "{misses}, {:?}", schedule.statistics());
}

#[test]
fn a_fetch_that_failed_is_a_miss() {
    let mut schedule = tens(3, UNLIMITED);
    walk(&mut schedule, &[0, 1, 2]);
    schedule.begin_round();
    schedule.access(index(0));
    schedule.failed(index(1));
    schedule.failed(index(0));
    assert_eq!(schedule.live_bytes(), Bytes::new(10));
    assert!(!schedule.release(index(0)));
    assert_eq!(hits(&walk(&mut schedule, &[1, 2])), [false, true]);
    assert_eq!(schedule.statistics().wasted, 0);
}

#[test]
fn a_round_voids_what_is_resident() {
    let mut schedule = tens(3, UNLIMITED);
    walk(&mut schedule, &[0, 1, 2]);
    schedule.begin_round();
    schedule.access(index(0));
    schedule.begin_round();
    assert_eq!((schedule.live_bytes(), schedule.statistics().wasted), (Bytes::ZERO, 2));
    assert!(!schedule.release(index(0)), "it was in use when the round ended");
    assert!(!schedule.access(index(0)).hit);
}

#[test]
fn a_round_without_accesses_keeps_the_prediction() {
    let mut schedule = tens(3, UNLIMITED);
    walk(&mut schedule, &[0, 1, 2]);
    schedule.begin_round();
    schedule.begin_round();
    assert_eq!(numbers(&schedule.access(index(0)).fetch), [1, 2]);
}

#[test]
fn a_parameter_that_does_not_exist_changes_nothing() {
    let mut schedule = tens(1, UNLIMITED);
    assert_eq!(schedule.access(index(1)), Accessed::default());
    assert!(!schedule.release(index(1)));
    schedule.failed(index(1));
    assert_eq!(schedule.statistics(), LookAheadStatistics::default());
}

#[test]
fn bytes_that_nobody_can_count_are_no_trouble() {
    let mut schedule = LookAhead::new(vec![Bytes::new(u64::MAX); 3], UNLIMITED);
    for _ in 0..2 {
        [0, 1, 2].into_iter().for_each(|parameter| drop(schedule.access(index(parameter))));
        assert_eq!(schedule.live_bytes(), Bytes::new(u64::MAX));
        schedule.begin_round();
    }
}

/// What a caller does.
#[derive(Clone, Debug)]
enum Call {
    Access(usize),
    Release(usize),
    Failed(usize),
    Round,
}

/// How a caller holds a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Held {
    /// Fetched ahead and not used yet.
    Ahead,
    InUse,
    Kept,
}

/// A caller that does as told, and checks that it can.
struct Caller {
    schedule: LookAhead,
    bytes: Vec<u64>,
    options: LookAheadOptions,
    held: BTreeMap<usize, Held>,
    statistics: LookAheadStatistics,
}

impl Caller {
    fn new(bytes: Vec<u64>, options: LookAheadOptions) -> Self {
        let schedule = LookAhead::new(bytes.iter().copied().map(Bytes::new).collect(), options);
        Self { schedule, bytes, options, held: BTreeMap::new(), statistics: LookAheadStatistics::default() }
    }

    fn bytes_where(&self, counts: impl Fn(Held) -> bool) -> u64 {
        self.held.iter().filter(|&(_, &held)| counts(held)).map(|(&parameter, _)| self.bytes[parameter]).sum()
    }

    fn call(&mut self, call: &Call) -> Accessed {
        let mut accessed = Accessed::default();
        match *call {
            Call::Access(parameter) => {
                accessed = self.schedule.access(index(parameter));
                assert_eq!(accessed.hit, self.held.contains_key(&parameter));
                *if accessed.hit { &mut self.statistics.hits } else { &mut self.statistics.misses } += 1;
                for dropped in numbers(&accessed.evict) {
                    assert_ne!(dropped, parameter);
                    let held = self.held.remove(&dropped).expect("only what is resident can be dropped");
                    assert_ne!(held, Held::InUse);
                    self.statistics.wasted += u64::from(held == Held::Ahead);
                }
                self.held.insert(parameter, Held::InUse);
                for fetched in numbers(&accessed.fetch) {
                    assert!(!accessed.evict.contains(&index(fetched)), "dropped and fetched at once");
                    assert_eq!(self.held.insert(fetched, Held::Ahead), None, "fetched twice");
                }
            }
            Call::Release(parameter) => {
                let used = self.held.get(&parameter) == Some(&Held::InUse);
                let keep = self.schedule.release(index(parameter));
                match (used, keep) {
                    (true, true) => drop(self.held.insert(parameter, Held::Kept)),
                    (true, false) => drop(self.held.remove(&parameter)),
                    (false, keep) => assert_eq!(keep, self.held.contains_key(&parameter)),
                }
            }
            Call::Failed(parameter) => {
                self.schedule.failed(index(parameter));
                self.held.remove(&parameter);
            }
            Call::Round => {
                self.schedule.begin_round();
                self.statistics.wasted +=
                    self.held.values().filter(|&&held| held == Held::Ahead).count() as u64;
                self.held.clear();
            }
        }
        self.check();
        accessed
    }

    fn check(&self) {
        let all = self.bytes_where(|_| true);
        assert_eq!(self.schedule.live_bytes(), Bytes::new(all));
        assert_eq!(self.schedule.statistics(), self.statistics);
        assert!(self.bytes_where(|held| held == Held::Ahead) <= self.options.lookahead_bytes.get());
        if self.options.live_bytes.is_some_and(|most| all > most.get()) {
            assert!(self.held.values().all(|&held| held == Held::InUse), "{:?}", self.held);
        }
        if self.options.reuse_bytes == Bytes::ZERO {
            // Nothing is kept but for the window.
            assert!(
                self.bytes_where(|held| held != Held::InUse) <= self.options.lookahead_bytes.get(),
                "{:?}",
                self.held
            );
        }
    }
}

fn budgets() -> impl Strategy<Value = LookAheadOptions> {
    (0..120_u64, prop::option::of(0..120_u64), prop_oneof![Just(0), 0..120_u64]).prop_map(
        |(lookahead, live, reuse)| LookAheadOptions {
            lookahead_bytes: Bytes::new(lookahead),
            live_bytes: live.map(Bytes::new),
            reuse_bytes: Bytes::new(reuse),
        },
    )
}

/// Parameters with a few rounds over them: an order that repeats, with calls thrown in between.
fn rounds() -> impl Strategy<Value = (Vec<u64>, Vec<Call>)> {
    prop::collection::vec(prop_oneof![Just(0), 1..50_u64], 1..10).prop_flat_map(|bytes| {
        let parameter = 0..bytes.len();
        let calls = |most| {
            let call = prop_oneof![
                6 => parameter.clone().prop_map(Call::Access),
                5 => parameter.clone().prop_map(Call::Release),
                1 => parameter.clone().prop_map(Call::Failed),
            ];
            prop::collection::vec(call, 0..most)
        };
        let order = calls(40);
        let round = (calls(6), any::<prop::sample::Index>(), any::<prop::sample::Index>());
        (Just(bytes), order, prop::collection::vec(round, 0..5)).prop_map(|(bytes, order, rounds)| {
            let mut all = order.clone();
            for (extra, one, other) in rounds {
                all.push(Call::Round);
                let cuts = [one.index(order.len() + 1), other.index(order.len() + 1)];
                // Something is left out or done twice, and something is added.
                all.extend_from_slice(&order[..cuts[0]]);
                all.extend(extra);
                all.extend_from_slice(&order[cuts[1]..]);
            }
            (bytes, all)
        })
    })
}

proptest! {
    #[test]
    fn any_sequence_of_calls_is_served_within_the_budgets(
        (bytes, calls) in rounds(),
        options in budgets(),
    ) {
        let mut caller = Caller::new(bytes, options);
        for call in &calls {
            caller.call(call);
        }
    }

    #[test]
    fn equal_calls_get_equal_answers((bytes, calls) in rounds(), options in budgets()) {
        let mut callers = [Caller::new(bytes.clone(), options), Caller::new(bytes, options)];
        for call in &calls {
            let [one, other] = &mut callers;
            prop_assert_eq!(one.call(call), other.call(call));
        }
    }

    #[test]
    fn an_order_that_repeats_hits_in_all_but_its_first_access(
        (bytes, order) in prop::collection::vec(0..50_u64, 1..10).prop_flat_map(|bytes| {
            let order = prop::collection::vec(0..bytes.len(), 1..600);
            (Just(bytes), order)
        }),
        users in 1..4_usize,
    ) {
        let mut caller = Caller::new(bytes, UNLIMITED);
        for round in 0..3 {
            let mut using = Vec::new();
            for (at, &parameter) in order.iter().enumerate() {
                let accessed = caller.call(&Call::Access(parameter));
                prop_assert!(accessed.hit || round == 0 || at == 0, "round {round}, access {at}");
                using.retain(|&other| other != parameter);
                using.push(parameter);
                if using.len() > users {
                    caller.call(&Call::Release(using.remove(0)));
                }
            }
            prop_assert_eq!(caller.statistics.wasted, 0);
            caller.call(&Call::Round);
        }
    }

    #[test]
    fn a_window_that_holds_the_next_parameter_is_enough_for_an_order_that_repeats(
        bytes in prop::collection::vec(0..50_u64, 1..40),
    ) {
        let largest = bytes.iter().copied().max().unwrap_or(0);
        let options = LookAheadOptions {
            lookahead_bytes: Bytes::new(largest.max(1)),
            live_bytes: Some(Bytes::new(2 * largest)),
            reuse_bytes: Bytes::ZERO,
        };
        let mut caller = Caller::new(bytes, options);
        let order: Vec<_> = (0..caller.bytes.len()).chain((0..caller.bytes.len()).rev()).collect();
        for round in 0..3 {
            for (at, &parameter) in order.iter().enumerate() {
                let accessed = caller.call(&Call::Access(parameter));
                prop_assert!(accessed.hit || round == 0 || at == 0, "round {round}, access {at}");
                caller.call(&Call::Release(parameter));
            }
            caller.call(&Call::Round);
        }
    }
}
