//! Which state leaves the device, and for where.

use std::num::NonZeroU32;

use proptest::prelude::*;
use zero_core::{
    Bytes, DType, Footprints, Layout, LayoutOptions, Machine, Medium, MemorySetup, Offload, OptimizerCost,
    ParameterSpec, Placement, PlacementError, PlacementPlan, Precision, Rank, ReduceGradients, Stage, Tier,
    WorldSize, ZeroConfig,
};

fn medium(capacity: u64, read: f64, write: f64) -> Medium {
    Medium { capacity: Bytes::new(capacity), read, write }
}

fn footprints(optimizer: u64, gradients: u64, parameters: u64, backwards: u32) -> Footprints {
    let [optimizer, gradients, parameters] = [optimizer, gradients, parameters].map(Bytes::new);
    Footprints { optimizer, gradients, parameters, backwards: NonZeroU32::new(backwards).unwrap() }
}

fn auto(path: Option<&str>) -> Placement {
    Placement { tier: Tier::Auto, path: path.map(Into::into), fraction: 1.0 }
}

fn placed(tier: Tier, path: Option<&str>, fraction: f64) -> Placement {
    Placement { tier, path: path.map(Into::into), fraction }
}

fn offload(optimizer: Placement, gradients: Placement, parameters: Placement, buffers: u64) -> Offload {
    Offload { optimizer, gradients, parameters, buffer_bytes: Bytes::new(buffers), ..Offload::default() }
}

/// All to be chosen, the disk for all but masters.
fn free(buffers: u64) -> Offload {
    offload(auto(Some("/nvme")), auto(Some("/nvme")), auto(None), buffers)
}

/// 100 bytes of optimizer state, 50 of masters, 50 of gradients that move twice.
fn state() -> Footprints {
    footprints(100, 50, 50, 2)
}

/// Per byte read and written, the device takes 0.002 s, the host 0.02 s, the disk 0.3 s.
fn machine(device: u64, host: Option<u64>, disk: Option<u64>) -> Machine {
    Machine {
        device: medium(device, 1000.0, 1000.0),
        host: host.map(|host| medium(host, 100.0, 100.0)),
        disk: disk.map(|disk| medium(disk, 10.0, 5.0)),
    }
}

fn places(plan: &PlacementPlan) -> [(Tier, u64); 3] {
    plan.kinds.map(|kind| (kind.tier, kind.kept.get()))
}

fn check_seconds(plan: &PlacementPlan, expected: f64) {
    assert!((plan.seconds - expected).abs() < 1e-9, "{} is not {expected}", plan.seconds);
}

#[test]
fn what_fits_on_the_device_stays_there() {
    let plan = free(8).resolve(&state(), &machine(200, Some(1000), Some(1000))).unwrap();
    let device = Placement::default();
    assert_eq!(plan.offload, offload(device.clone(), device.clone(), device, 8));
    // 250 bytes are moved.
    check_seconds(&plan, 250.0 * 0.002);
}

#[test]
fn what_moves_least_leaves_the_device_first_and_no_more_than_has_to() {
    let plan = |device| free(8).resolve(&state(), &machine(device, Some(1000), Some(1000))).unwrap();
    let optimizer = plan(170);
    assert_eq!(places(&optimizer), [(Tier::Host, 30), (Tier::Device, 0), (Tier::Device, 0)]);
    assert_eq!(optimizer.offload.optimizer, placed(Tier::Host, None, 0.3));
    check_seconds(&optimizer, 30.0 * 0.02 + 220.0 * 0.002);

    assert_eq!(places(&plan(80)), [(Tier::Host, 100), (Tier::Device, 0), (Tier::Host, 20)]);
    let all = plan(10);
    assert_eq!(places(&all), [(Tier::Host, 100), (Tier::Host, 40), (Tier::Host, 50)]);
    check_seconds(&all, 150.0 * 0.02 + 2.0 * (40.0 * 0.02 + 10.0 * 0.002));
}

#[test]
fn the_disk_takes_what_memory_has_no_room_for() {
    // 18 of the host's 98 bytes are buffers; the disk holds half of its size. 150 bytes leave the device, 80 for the host.
    let plan = free(18).resolve(&state(), &machine(50, Some(98), Some(200))).unwrap();
    assert_eq!(places(&plan), [(Tier::Nvme, 70), (Tier::Host, 30), (Tier::Host, 50)]);
    check_seconds(&plan, 70.0 * 0.3 + 30.0 * 0.002 + 50.0 * 0.02 + 2.0 * (30.0 * 0.02 + 20.0 * 0.002));
    assert_eq!(plan.offload.optimizer, placed(Tier::Nvme, Some("/nvme"), 0.7));

    // Neither has room for what the other leaves of the optimizer's, so that gradients go to the disk.
    let plan = free(0).resolve(&state(), &machine(50, Some(130), Some(40))).unwrap();
    assert_eq!(places(&plan), [(Tier::Host, 100), (Tier::Nvme, 20), (Tier::Host, 30)]);
    check_seconds(&plan, 130.0 * 0.02 + 20.0 * 0.002 + 2.0 * (20.0 * 0.3 + 30.0 * 0.002));
}

#[test]
fn masters_follow_their_states_to_the_disk() {
    let given = Offload { parameters: auto(Some("/masters")), ..free(8) };
    let plan = |device, host| given.resolve(&state(), &machine(device, host, Some(1000)));
    // States first, then masters, and gradients, which move twice, last.
    let places_of = |device, host| places(&plan(device, host).unwrap());
    assert_eq!(places_of(108, None), [(Tier::Nvme, 100), (Tier::Device, 0), (Tier::Device, 0)]);
    assert_eq!(places_of(78, None), [(Tier::Nvme, 100), (Tier::Device, 0), (Tier::Nvme, 30)]);
    assert_eq!(places_of(8, None), [(Tier::Nvme, 100), (Tier::Nvme, 50), (Tier::Nvme, 50)]);
    plan(7, None).unwrap_err();
    assert_eq!(plan(8, None).unwrap().offload.parameters, placed(Tier::Nvme, Some("/masters"), 1.0));

    // Without states on the disk there are no masters either, and of half of the states half of the masters.
    let stuck = Offload { optimizer: Placement::default(), ..given.clone() };
    stuck.resolve(&state(), &machine(107, None, Some(1000))).unwrap_err();
    let half = Offload { optimizer: placed(Tier::Nvme, Some("/a"), 0.5), ..given.clone() };
    let plan = half.resolve(&state(), &machine(133, None, Some(1000))).unwrap();
    assert_eq!(places(&plan), [(Tier::Nvme, 50), (Tier::Device, 0), (Tier::Nvme, 25)]);
    assert_eq!(plan.offload.parameters.fraction, 0.5);
    let plan = half.resolve(&state(), &machine(132, None, Some(1000))).unwrap();
    assert_eq!(places(&plan), [(Tier::Nvme, 50), (Tier::Nvme, 1), (Tier::Nvme, 25)]);
}

#[test]
fn what_is_not_to_be_chosen_stays_and_takes_room() {
    let given = offload(placed(Tier::Nvme, Some("/a"), 0.5), auto(Some("/b")), auto(None), 8);
    let plan = given.resolve(&state(), &machine(100, Some(58), Some(200))).unwrap();
    // 50 bytes are on the device and 50 on the disk by the configuration; 50 of the rest leave for the host.
    assert_eq!(places(&plan), [(Tier::Nvme, 50), (Tier::Device, 0), (Tier::Host, 50)]);
    assert_eq!(plan.offload.optimizer, given.optimizer);
    assert_eq!((plan.offload.buffer_bytes, plan.offload.depth), (given.buffer_bytes, given.depth));
    // Without the host, masters have no place but the device, and so the gradients have to leave for the disk.
    let plan = given.resolve(&state(), &machine(108, None, Some(200))).unwrap();
    assert_eq!(places(&plan), [(Tier::Nvme, 50), (Tier::Nvme, 50), (Tier::Device, 0)]);
    assert_eq!(plan.offload.gradients.path, Some("/b".into()));
    // Something on the host that is the device is still there.
    let on_host = offload(placed(Tier::Host, None, 1.0), Placement::default(), Placement::default(), 8);
    let plan = on_host.resolve(&state(), &machine(200, None, None)).unwrap();
    assert_eq!(plan.offload, on_host);
    check_seconds(&plan, 250.0 * 0.002);
}

#[test]
fn what_cannot_be_held_is_refused() {
    let error = free(8).resolve(&state(), &machine(50, Some(50), None)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "200 B of state do not fit as configured: 50 B are free on the device, 50 B on the host and 0 B on the disk, \
         where state takes twice its size and 8 B of buffers; use more ranks, a higher stage or `path` with the tier \
         \"auto\""
    );
    // A disk of no use without a path.
    let pathless = offload(auto(None), auto(None), auto(None), 8);
    pathless.resolve(&state(), &machine(50, Some(50), Some(1000))).unwrap_err();
    // Nor without memory for buffers.
    free(51).resolve(&state(), &machine(50, Some(50), Some(1000))).unwrap_err();
    free(51).resolve(&state(), &machine(100, None, Some(1000))).unwrap_err();
    free(50).resolve(&state(), &machine(100, None, Some(1000))).unwrap();

    let on_disk = offload(placed(Tier::Nvme, Some("/a"), 1.0), auto(None), auto(None), 8);
    let error = on_disk.resolve(&state(), &machine(200, None, None)).unwrap_err();
    assert_eq!(error, PlacementError::NoDisk { kind: "optimizer" });
}

#[test]
fn a_bandwidth_that_is_none_is_refused() {
    for found in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let sound = machine(200, Some(1), Some(1));
        let slow = medium(200, 1.0, found);
        for (tier, machine) in [
            (Tier::Device, Machine { device: slow, ..sound }),
            (Tier::Host, Machine { host: Some(slow), ..sound }),
            (Tier::Nvme, Machine { disk: Some(slow), ..sound }),
        ] {
            let message = free(8).resolve(&state(), &machine).unwrap_err().to_string();
            let expected =
                format!("the bandwidth of the tier \"{tier}\" for writing is {found} bytes per second");
            assert!(message.starts_with(&expected), "{message}");
        }
    }
}

#[test]
fn a_tier_is_no_faster_than_those_it_is_reached_by() {
    // A host measured faster than its device, and a disk faster than both, draw nothing.
    let machine = Machine {
        device: medium(200, 10.0, 10.0),
        host: Some(medium(200, 100.0, 100.0)),
        disk: Some(medium(400, 1000.0, 1000.0)),
    };
    let plan = free(0).resolve(&state(), &machine).unwrap();
    assert_eq!(places(&plan), [(Tier::Device, 0); 3]);
    check_seconds(&plan, 250.0 * 0.2);
}

#[test]
fn a_plan_is_shown_as_a_table() {
    let plan = free(18).resolve(&state(), &machine(50, Some(98), Some(200))).unwrap();
    let expected = "\
state            bytes  passes  tier    kept there  seconds
optimizer        100 B       1  nvme          70 B   21.060
gradients         50 B       2  host          30 B    1.280
parameters        50 B       1  host          50 B    1.000
update                                               23.340";
    assert_eq!(plan.to_string(), expected);
}

#[test]
fn the_largest_state_overflows_nothing() {
    let most = u64::MAX;
    let state = footprints(most, most, most, u32::MAX);
    let huge = |device| machine(device, Some(u64::MAX), Some(u64::MAX));
    free(0).resolve(&state, &huge(u64::MAX)).unwrap_err();
    let state = Footprints { gradients: Bytes::ZERO, ..state };
    let plan = free(0).resolve(&state, &huge(u64::MAX)).unwrap();
    assert_eq!(places(&plan)[0], (Tier::Host, u64::MAX));
}

#[test]
fn what_could_leave_the_device_is_what_memory_plans_count() {
    let spec = |name: &str, numel, trainable| ParameterSpec {
        name: name.into(),
        shape: vec![numel],
        dtype: DType::F32,
        trainable,
        aliases: vec![],
    };
    let specs = vec![spec("a.w", 10, true), spec("a.b", 3, true), spec("e.w", 7, false)];
    let layout = Layout::new(specs, WorldSize::new(2).unwrap(), LayoutOptions::default()).unwrap();
    let footprints = |stage, compute, reduce_gradients| {
        let precision = Precision { compute, ..Precision::default() };
        let config = ZeroConfig { stage, precision, reduce_gradients, ..ZeroConfig::default() };
        let setup = MemorySetup::new(&config, OptimizerCost::ADAMW);
        let three = NonZeroU32::new(3).unwrap();
        let Footprints { optimizer, gradients, parameters, backwards } =
            setup.footprints(&layout, Rank::ROOT, three);
        assert_eq!(backwards, three);
        [optimizer, gradients, parameters].map(Bytes::get)
    };
    // 5 of the first and 2 of the second are rank 0's; of the frozen one, 4 masters.
    assert_eq!(footprints(Stage::Three, DType::BF16, None), [7 * 8, 7 * 4, 11 * 4]);
    assert_eq!(footprints(Stage::Two, DType::F32, None), [7 * 8, 7 * 4, 0]);
    assert_eq!(footprints(Stage::One, DType::BF16, None), [7 * 8, 0, 11 * 4]);
    let early = Some(ReduceGradients::EveryBackward);
    assert_eq!(footprints(Stage::Zero, DType::BF16, early), [13 * 8, 13 * 4, 20 * 4]);
}

/// Bytes on the device, the host and the disk, and seconds, as one would count them.
fn count(machine: &Machine, state: &Footprints, places: [(Tier, u64); 3], buffers: u64) -> ([u64; 3], f64) {
    let per_byte = |medium: Medium| 1.0 / medium.read + 1.0 / medium.write;
    let device = per_byte(machine.device);
    let host = machine.host.map_or(device, |host| per_byte(host).max(device));
    let disk = machine.disk.map_or(host, |disk| per_byte(disk).max(host));
    let (mut used, mut seconds) = ([0; 3], 0.0);
    let passes = [1, state.backwards.get(), 1];
    let bytes = [state.optimizer, state.gradients, state.parameters];
    for ((bytes, passes), (tier, kept)) in bytes.into_iter().zip(passes).zip(places) {
        used[0] += bytes.get() - kept;
        let cost = match tier {
            Tier::Nvme => {
                used[2] += 2 * kept;
                disk
            }
            Tier::Host if machine.host.is_some() => {
                used[1] += kept;
                host
            }
            _ => {
                used[0] += kept;
                device
            }
        };
        seconds += f64::from(passes) * ((bytes.get() - kept) as f64 * device + kept as f64 * cost);
    }
    if used[2] > 0 {
        used[usize::from(machine.host.is_some())] += buffers;
    }
    (used, seconds)
}

fn holds(machine: &Machine, used: [u64; 3]) -> bool {
    let capacity = |medium: Option<Medium>| medium.map_or(0, |medium| medium.capacity.get());
    let capacities = [Some(machine.device), machine.host, machine.disk].map(capacity);
    used.into_iter().zip(capacities).all(|(used, capacity)| used <= capacity)
}

/// The least seconds of all that an offload can say, if it can say anything that fits.
fn least(machine: &Machine, state: &Footprints, offload: &Offload) -> Option<f64> {
    let choices = |placement: &Placement, bytes: Bytes| -> Vec<(Tier, u64)> {
        let bytes = bytes.get();
        match placement.tier {
            Tier::Auto => {
                let disk = placement.path.is_some() && machine.disk.is_some();
                let tiers =
                    [Some(Tier::Host).filter(|_| machine.host.is_some()), Some(Tier::Nvme).filter(|_| disk)];
                let tiers = tiers.into_iter().flatten();
                let away = tiers.flat_map(|tier| (1..=bytes).map(move |kept| (tier, kept)));
                [(Tier::Device, 0)].into_iter().chain(away).collect()
            }
            tier => vec![(tier, placement.elements(bytes as usize) as u64)],
        }
    };
    let mut least = None;
    for optimizer in choices(&offload.optimizer, state.optimizer) {
        for gradients in choices(&offload.gradients, state.gradients) {
            for parameters in choices(&offload.parameters, state.parameters) {
                let places = [optimizer, gradients, parameters];
                if offload.parameters.tier == Tier::Auto
                    && masters_lead(offload, state, optimizer, parameters)
                {
                    continue;
                }
                let (used, seconds) = count(machine, state, places, offload.buffer_bytes.get());
                if holds(machine, used) && least.is_none_or(|least| seconds < least) {
                    least = Some(seconds);
                }
            }
        }
    }
    least
}

/// Whether a larger fraction of masters is on the disk than of states.
fn masters_lead(
    offload: &Offload,
    state: &Footprints,
    optimizer: (Tier, u64),
    parameters: (Tier, u64),
) -> bool {
    let fraction = |(tier, kept): (Tier, u64), bytes: Bytes| match tier {
        Tier::Nvme if kept > 0 => kept as f64 / bytes.get() as f64,
        _ => 0.0,
    };
    let states = match offload.optimizer.tier {
        Tier::Nvme if state.optimizer > Bytes::ZERO => offload.optimizer.fraction,
        _ => fraction(optimizer, state.optimizer),
    };
    fraction(parameters, state.parameters) > states
}

fn any_placement() -> impl Strategy<Value = Placement> {
    prop_oneof![
        4 => prop::option::weighted(0.8, Just("/nvme")).prop_map(auto),
        1 => Just(Placement::default()),
        1 => (0.0..=1.0).prop_map(|fraction| placed(Tier::Host, None, fraction)),
        1 => (0.0..=1.0).prop_map(|fraction| placed(Tier::Nvme, Some("/nvme"), fraction)),
    ]
}

/// Whether a configuration may say so: no larger a fraction of masters on a disk than of states.
fn is_legal(offload: &Offload) -> bool {
    let fraction =
        |placement: &Placement| if placement.tier == Tier::Nvme { placement.fraction } else { 0.0 };
    fraction(&offload.parameters) <= fraction(&offload.optimizer)
}

fn any_case() -> impl Strategy<Value = (Machine, Footprints, Offload)> {
    let any_medium =
        || (0..24_u64, 0.1..1e3, 0.1..1e3).prop_map(|(size, read, write)| medium(size, read, write));
    let machine =
        (any_medium(), prop::option::weighted(0.8, any_medium()), prop::option::weighted(0.8, any_medium()))
            .prop_map(|(device, host, disk)| Machine { device, host, disk });
    let state = (0..10_u64, 0..10_u64, 0..10_u64, 1..4_u32).prop_map(
        |(optimizer, gradients, parameters, backwards)| {
            footprints(optimizer, gradients, parameters, backwards)
        },
    );
    let placements = (any_placement(), any_placement(), any_placement(), 0..4_u64).prop_map(
        |(optimizer, gradients, parameters, buffers)| offload(optimizer, gradients, parameters, buffers),
    );
    let placements = placements.prop_filter("masters follow their states", is_legal);
    (machine, state, placements)
}

proptest! {
    #[test]
    fn a_plan_holds_everything_in_the_least_time_if_anything_can((machine, state, offload) in any_case()) {
        let plan = match offload.resolve(&state, &machine) {
            Err(PlacementError::NoDisk { .. }) => {
                prop_assert!(machine.disk.is_none());
                return Ok(());
            }
            plan => plan.ok(),
        };
        let least = least(&machine, &state, &offload);
        prop_assert_eq!(plan.is_some(), least.is_some());
        let (Some(plan), Some(least)) = (plan, least) else { return Ok(()) };
        let (used, seconds) = count(&machine, &state, places(&plan), offload.buffer_bytes.get());
        prop_assert!(holds(&machine, used), "{plan}");
        prop_assert!((plan.seconds - seconds).abs() <= 1e-9 * seconds, "{plan}");
        prop_assert!((seconds - least).abs() <= 1e-9 * least, "{least} would do\n{plan}");
        prop_assert_eq!(&plan, &offload.resolve(&state, &machine).unwrap());

        // What is resolved has nothing to choose, keeps what was chosen already, and says what was counted.
        let asked = [&offload.optimizer, &offload.gradients, &offload.parameters];
        let found = [&plan.offload.optimizer, &plan.offload.gradients, &plan.offload.parameters];
        for ((asked, found), kind) in asked.into_iter().zip(found).zip(plan.kinds) {
            prop_assert!(found.tier != Tier::Auto);
            if asked.tier != Tier::Auto {
                prop_assert_eq!(asked, found);
                continue;
            }
            let kept = found.elements(kind.bytes.get() as usize) as u64;
            prop_assert!(kept.abs_diff(kind.kept.get()) <= 1, "{plan}");
            prop_assert_eq!(found.tier, kind.tier);
            prop_assert_eq!(found.path.is_some(), found.tier == Tier::Nvme);
            prop_assert!((0.0..=1.0).contains(&found.fraction));
        }
    }

    #[test]
    fn more_room_is_never_slower(
        (machine, state, offload) in any_case(),
        (device, host, disk) in (0..9_u64, 0..9_u64, 0..9_u64),
    ) {
        let more = |medium: Medium, room| {
            Medium { capacity: Bytes::new(medium.capacity.get() + room), ..medium }
        };
        let larger = Machine {
            device: more(machine.device, device),
            host: machine.host.map(|medium| more(medium, host)),
            disk: machine.disk.map(|medium| more(medium, disk)),
        };
        if let Ok(plan) = offload.resolve(&state, &machine) {
            let faster = offload.resolve(&state, &larger).unwrap();
            prop_assert!(faster.seconds <= plan.seconds * (1.0 + 1e-9), "{plan}\n{faster}");
        }
    }

    #[test]
    fn nothing_is_chosen_for_the_disk_if_memory_suffices((machine, state, offload) in any_case()) {
        let free = |placement: Placement| match placement.tier {
            Tier::Nvme => auto(Some("/nvme")),
            _ => placement,
        };
        let Offload { optimizer, gradients, parameters, .. } = offload.clone();
        let [optimizer, gradients, parameters] = [optimizer, gradients, parameters].map(free);
        let offload = Offload { optimizer, gradients, parameters, ..offload };
        let diskless = Machine { disk: None, ..machine };
        if let Ok(plan) = offload.resolve(&state, &diskless) {
            prop_assert_eq!(plan, offload.resolve(&state, &machine).unwrap());
        }
    }
}
