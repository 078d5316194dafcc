//! Handles with functions that only note that they were called.

use std::cell::RefCell;

use super::*;
use crate::nccl::library::NcclVersion;

thread_local! {
    /// The functions that were called, with their numbers.
    static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// What a function returns that is not said otherwise.
    static RESULTS: RefCell<Vec<(&'static str, c_int)>> = const { RefCell::new(Vec::new()) };
}

fn called(function: &'static str, arguments: String) -> c_int {
    CALLS.with_borrow_mut(|calls| calls.push(format!("{function}{arguments}")));
    let result =
        |results: &Vec<(_, _)>| results.iter().find(|(name, _)| *name == function).map(|(_, code)| *code);
    RESULTS.with_borrow(result).unwrap_or(SUCCESS)
}

fn calls() -> Vec<String> {
    CALLS.take()
}

/// Functions that note that they were called.
mod noting {
    use std::ffi::c_char;

    use super::*;

    pub(super) unsafe extern "C" fn id(_: *mut UniqueId) -> c_int {
        called("id", String::new())
    }
    pub(super) unsafe extern "C" fn init(
        made: *mut RawCommunicator,
        size: c_int,
        _: UniqueId,
        rank: c_int,
        _: *mut Config,
    ) -> c_int {
        // SAFETY: the handle's own memory.
        unsafe { *made = ptr::dangling_mut() };
        called("init", format!(" {rank} of {size}"))
    }
    pub(super) unsafe extern "C" fn split(
        _: RawCommunicator,
        color: c_int,
        key: c_int,
        made: *mut RawCommunicator,
        _: *mut Config,
    ) -> c_int {
        if color >= 0 {
            // SAFETY: the splitting's own memory.
            unsafe { *made = ptr::dangling_mut() };
        }
        called("split", format!(" {color} {key}"))
    }
    pub(super) unsafe extern "C" fn finalize(_: RawCommunicator) -> c_int {
        called("finalize", String::new())
    }
    pub(super) unsafe extern "C" fn destroy(_: RawCommunicator) -> c_int {
        called("destroy", String::new())
    }
    pub(super) unsafe extern "C" fn abort(_: RawCommunicator) -> c_int {
        called("abort", String::new())
    }
    pub(super) unsafe extern "C" fn state(_: RawCommunicator, state: *mut c_int) -> c_int {
        // SAFETY: the handle's own memory.
        unsafe { *state = called("state", String::new()) };
        SUCCESS
    }
    pub(super) unsafe extern "C" fn error(_: c_int) -> *const c_char {
        c"text of the code".as_ptr()
    }
    pub(super) unsafe extern "C" fn last(_: RawCommunicator) -> *const c_char {
        c"the last error\n".as_ptr()
    }
    pub(super) unsafe extern "C" fn start() -> c_int {
        called("start", String::new())
    }
    pub(super) unsafe extern "C" fn end() -> c_int {
        called("end", String::new())
    }

    type Memory = *const c_void;
    type MemoryMut = *mut c_void;

    macro_rules! moves {
        ($($name:ident($($number:ident),*);)*) => {$(
            pub(super) unsafe extern "C" fn $name(
                from: Memory,
                into: MemoryMut,
                count: usize,
                $($number: c_int,)*
                _: RawCommunicator,
                _: RawStream,
            ) -> c_int {
                let numbers: Vec<c_int> = vec![$($number),*];
                called(stringify!($name), format!(" {} {} {count} {numbers:?}", from as usize, into as usize))
            }
        )*};
    }

    moves! {
        all_reduce(dtype, op);
        all_gather(dtype);
        reduce_scatter(dtype, op);
        broadcast(dtype, root);
        reduce(dtype, op, root);
    }

    pub(super) unsafe extern "C" fn send(
        from: Memory,
        count: usize,
        dtype: c_int,
        to: c_int,
        _: RawCommunicator,
        _: RawStream,
    ) -> c_int {
        called("send", format!(" {} {count} {dtype} {to}", from as usize))
    }
    pub(super) unsafe extern "C" fn receive(
        into: MemoryMut,
        count: usize,
        dtype: c_int,
        from: c_int,
        _: RawCommunicator,
        _: RawStream,
    ) -> c_int {
        called("receive", format!(" {} {count} {dtype} {from}", into as usize))
    }
}

static NOTING: Library = Library {
    version: NcclVersion { major: 2, minor: 18, patch: 0 },
    get_unique_id: noting::id,
    init_rank_config: noting::init,
    split: noting::split,
    finalize: noting::finalize,
    destroy: noting::destroy,
    abort: noting::abort,
    get_async_error: noting::state,
    get_error_string: noting::error,
    get_last_error: noting::last,
    group_start: noting::start,
    group_end: noting::end,
    all_reduce: noting::all_reduce,
    all_gather: noting::all_gather,
    reduce_scatter: noting::reduce_scatter,
    broadcast: noting::broadcast,
    reduce: noting::reduce,
    send: noting::send,
    receive: noting::receive,
};

fn handle() -> Handle {
    let handle = Handle::join(&NOTING, 3, UniqueId([0; 128]), 1).unwrap();
    assert_eq!(calls(), ["init 1 of 3"]);
    handle
}

fn primitive(kind: PrimitiveKind, dtype: DType) -> Primitive {
    Primitive { kind, from: 100, into: 200, count: 5, dtype }
}

fn issue(handle: &mut Handle, calls: &[Primitive]) -> Result<(), Refusal> {
    // SAFETY: the functions do nothing with memory or stream.
    unsafe { handle.issue(calls, ptr::null_mut()) }
}

#[test]
fn every_operation_reaches_its_function_with_nccl_s_numbers() {
    let mut handle = handle();
    issue(
        &mut handle,
        &[
            primitive(PrimitiveKind::AllReduce(ReduceOp::Sum), DType::F32),
            primitive(PrimitiveKind::AllReduce(ReduceOp::Mean), DType::BF16),
            primitive(PrimitiveKind::AllGather, DType::U8),
            primitive(PrimitiveKind::ReduceScatter(ReduceOp::Max), DType::F64),
            primitive(PrimitiveKind::Broadcast { root: 2 }, DType::I32),
            primitive(PrimitiveKind::Reduce { op: ReduceOp::Min, root: 1 }, DType::F16),
            primitive(PrimitiveKind::Send { to: 2 }, DType::I64),
            primitive(PrimitiveKind::Receive { from: 0 }, DType::I64),
        ],
    )
    .unwrap();
    let expected = [
        "start",
        "all_reduce 100 200 5 [7, 0]",
        "all_reduce 100 200 5 [9, 4]",
        "all_gather 100 200 5 [1]",
        "reduce_scatter 100 200 5 [8, 2]",
        "broadcast 100 200 5 [2, 2]",
        "reduce 100 200 5 [6, 3, 1]",
        "send 100 5 4 2",
        "receive 200 5 4 0",
        "end",
    ];
    assert_eq!(calls(), expected);
}

#[test]
fn a_group_ends_though_an_operation_in_it_is_refused() {
    let mut handle = handle();
    RESULTS.set(vec![("all_gather", 5)]);
    let all = [PrimitiveKind::AllGather, PrimitiveKind::AllReduce(ReduceOp::Sum)];
    let refusal = issue(&mut handle, &all.map(|kind| primitive(kind, DType::U8))).unwrap_err();
    assert_eq!(calls(), ["start", "all_gather 100 200 5 [1]", "end"]);
    assert_eq!((refusal.function, refusal.code), ("ncclAllGather", 5));
    let error = refusal.during("all_gather \"x\" on rank 1".to_owned()).to_string();
    let said = "all_gather \"x\" on rank 1: ncclAllGather says \"text of the code: the last error\" (code 5)";
    assert!(error.starts_with(said), "{error}");
}

#[test]
fn what_is_begun_is_neither_done_nor_refused() {
    let mut handle = handle();
    RESULTS.set(vec![("end", IN_PROGRESS), ("state", IN_PROGRESS)]);
    issue(&mut handle, &[primitive(PrimitiveKind::AllGather, DType::U8)]).unwrap();
    assert_eq!(handle.ready().unwrap(), None);
    RESULTS.set(vec![]);
    assert_eq!(handle.ready().unwrap(), Some(()));
    RESULTS.set(vec![("state", 6)]);
    assert_eq!(handle.ready().unwrap_err().code, 6);
}

#[test]
fn a_communicator_goes_once() {
    let mut aborted = handle();
    aborted.abort();
    drop(aborted);
    assert_eq!(calls(), ["abort"]);

    let mut ended = handle();
    ended.finalize().unwrap();
    ended.destroy().unwrap();
    assert_eq!(ended.ready().unwrap_err().message, "the communicator was aborted");
    drop(ended);
    assert_eq!(calls(), ["finalize", "destroy"]);

    drop(handle());
    assert_eq!(calls(), ["abort"]);

    RESULTS.set(vec![("init", 2)]);
    assert!(Handle::join(&NOTING, 3, UniqueId([0; 128]), 1).is_err());
    assert_eq!(calls(), ["init 1 of 3", "abort"]);
}

#[test]
fn a_split_gives_a_communicator_to_ranks_with_a_color() {
    let mut handle = handle();
    let splitting = handle.split(Some(4), 2).unwrap();
    // SAFETY: the function has written what it writes.
    let child = unsafe { splitting.finish() };
    assert_eq!(calls(), ["split 4 2"]);
    drop(child.expect("a rank with a color has a communicator"));
    assert_eq!(calls(), ["abort"]);
    let splitting = handle.split(None, 0).unwrap();
    // SAFETY: as above.
    assert!(unsafe { splitting.finish() }.is_none());
    assert_eq!(calls(), ["split -1 0"]);
}
