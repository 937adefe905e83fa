//! The device computes what the CPU computes, and shows the mistakes it is made to show.

mod rig;

use ggml_sys::llama;
use lagging_device::{Options, Order, Pinned, register};
use rig::{Event, Stream, Tensors, bytes, floats, set};

fn options(order: Order) -> Options {
    Options { order, ..Options::default() }
}

/// `out = in + in`, of `n` floats.
fn doubling(stream: &Stream, n: i64) -> (Tensors, *mut llama::ggml_tensor, *mut llama::ggml_tensor) {
    let tensors = Tensors::new();
    let input = tensors.floats([n, 1, 1]);
    // SAFETY: all of one live context.
    let output = unsafe { llama::ggml_add(tensors.context, input, input) };
    tensors.compute(output);
    (tensors.on(stream), input, output)
}

/// An expert FFN in small: every kind of node that reads ids or writes rows. Returns the bytes of all results.
fn expert_ffn(stream: &Stream) -> Vec<Vec<u8>> {
    let noise = |n: usize| (0..n).map(|i| ((i * 2654435761) % 1000) as f32 / 500.0 - 1.0).collect::<Vec<f32>>();
    let tensors = Tensors::new();
    let experts = tensors.tensor(llama::GGML_TYPE_Q8_0, [64, 32, 6]);
    let input = tensors.floats([64, 1, 5]);
    let ids = tensors.tensor(llama::GGML_TYPE_I32, [2, 5, 1]);
    let bias = tensors.floats([32, 2, 1]);
    let table = tensors.floats([32, 7, 1]);
    let rows = tensors.tensor(llama::GGML_TYPE_I64, [2, 1, 1]);
    let some = tensors.tensor(llama::GGML_TYPE_I32, [3, 1, 1]);
    // SAFETY: all of one live context, with shapes that fit.
    let results = unsafe {
        let context = tensors.context;
        let gate = llama::ggml_mul_mat_id(context, experts, input, ids);
        let up = llama::ggml_add(context, gate, bias);
        let glu = llama::ggml_swiglu_split(context, gate, up);
        let first = llama::ggml_view_2d(context, glu, 32, 2, (*glu).nb[1], 0);
        let stored = llama::ggml_set_rows(context, table, first, rows);
        [gate, up, glu, stored, llama::ggml_get_rows(context, stored, some)]
    };
    tensors.compute(results[4]);
    let tensors = tensors.on(stream);
    let mut quantised = vec![0u8; 6 * 32 * 2 * 34];
    let values = noise(6 * 32 * 64);
    // SAFETY: 192 rows of 64 values are 192 x 2 blocks of 34 bytes.
    unsafe {
        let to = quantised.as_mut_ptr().cast();
        llama::ggml_quantize_chunk(llama::GGML_TYPE_Q8_0, values.as_ptr(), to, 0, 192, 64, std::ptr::null())
    };
    set(experts, &quantised);
    set(input, &noise(64 * 5));
    set(ids, &[5i32, 0, 1, 5, 2, 2, 0, 1, 5, 1]);
    set(bias, &noise(64));
    set(table, &noise(32 * 7));
    set(rows, &[6i64, 1]);
    set(some, &[6i32, 0, 1]);
    assert_eq!(stream.submit(&tensors), llama::GGML_STATUS_SUCCESS);
    stream.synchronize();
    results.map(|result| bytes(result)).to_vec()
}

#[test]
fn results_are_the_cpus_bit_for_bit() {
    let expected = expert_ffn(&Stream::cpu());
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = register(options(order));
        assert!(expert_ffn(&Stream::of(&device)) == expected, "{order:?}");
        assert_eq!(device.faults(), Vec::<String>::new());
    }
    let device = register(Options { real_time: true, link_bandwidth: 1e12, ..Options::default() });
    assert!(expert_ffn(&Stream::of(&device)) == expected, "real time");
}

#[test]
fn the_host_cannot_read_device_memory() {
    let device = register(Options::default());
    let stream = Stream::of(&device);
    let (tensors, input, output) = doubling(&stream, 4);
    stream.submit(&tensors);
    stream.synchronize();
    assert!(floats(output).iter().all(|value| value.is_nan()), "its memory was never written");
    let mut pipe = [0; 2];
    // SAFETY: the kernel checks the address and refuses instead of faulting.
    let written = unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        libc::write(pipe[1], (*input).data, 16)
    };
    assert_eq!((written, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EFAULT)));
}

#[test]
fn a_missing_event_shows() {
    for waits in [false, true] {
        // A product that does not wait for its upload multiplies the bytes from before.
        let device = register(options(Order::CopiesLate));
        let (compute, copies, landed) = (Stream::of(&device), Stream::of(&device), Event::of(&device));
        let (tensors, input, output) = doubling(&compute, 4);
        set(input, &[1.0f32; 4]);
        copies.upload(input, &[10.0f32; 4]);
        landed.record(&copies);
        if waits {
            landed.hold(&compute);
        }
        compute.submit(&tensors);
        compute.synchronize();
        assert_eq!(floats(output), [if waits { 20.0 } else { 2.0 }; 4], "an upload, waits: {waits}");

        // An upload that does not wait for the last use of its target overwrites the product's weights.
        let device = register(options(Order::CopiesEarly));
        let (compute, copies, used) = (Stream::of(&device), Stream::of(&device), Event::of(&device));
        let (tensors, input, output) = doubling(&compute, 4);
        set(input, &[1.0f32; 4]);
        compute.submit(&tensors);
        used.record(&compute);
        if waits {
            used.hold(&copies);
        }
        copies.upload(input, &[10.0f32; 4]);
        compute.synchronize();
        assert_eq!(floats(output), [if waits { 2.0 } else { 20.0 }; 4], "a last use, waits: {waits}");
    }
}

#[test]
fn waiting_for_an_event_runs_earlier_operations_only() {
    let device = register(options(Order::CopiesLate));
    let (stream, event) = (Stream::of(&device), Event::of(&device));
    let (_tensors, input, _) = doubling(&stream, 4);
    event.synchronize();
    stream.upload(input, &[1.0f32; 4]);
    event.record(&stream);
    stream.upload(input, &[2.0f32; 4]);
    event.synchronize();
    assert_eq!(floats(input), [1.0; 4]);
    stream.synchronize();
    assert_eq!(floats(input), [2.0; 4]);
}

#[test]
fn only_pinned_memory_is_read_when_the_upload_runs() {
    for (pinned, expected) in [(Pinned::Offered, 9.0), (Pinned::Refused, 1.0), (Pinned::None, 1.0)] {
        let device = register(Options { pinned, ..Options::default() });
        let stream = Stream::of(&device);
        let (_tensors, input, _) = doubling(&stream, 4);
        // SAFETY: a registered device.
        let host_type = unsafe { llama::ggml_backend_dev_host_buffer_type(device.raw()) };
        assert_eq!(host_type.is_null(), pinned == Pinned::None);
        // SAFETY: no arguments.
        let host_type = if host_type.is_null() { unsafe { llama::ggml_backend_cpu_buffer_type() } } else { host_type };
        let mut staging = Tensors::new();
        let source = staging.floats([4, 1, 1]);
        assert!(staging.allocate(host_type));
        // SAFETY: both are host memory of four floats, used by this thread.
        let host = unsafe { std::slice::from_raw_parts_mut((*source).data.cast::<f32>(), 4) };
        host.fill(1.0);
        stream.upload(input, host);
        host.fill(9.0);
        stream.synchronize();
        assert_eq!(floats(input), [expected; 4], "{pinned:?}");
    }
}

#[test]
fn a_graph_may_be_freed_once_it_is_submitted() {
    let device = register(options(Order::CopiesLate));
    let stream = Stream::of(&device);
    let (tensors, input, output) = doubling(&stream, 4);
    set(input, &[1.0f32; 4]);
    stream.submit(&tensors);
    // SAFETY: the nodes are live; afterwards they describe another computation, as when a caller reuses their memory.
    unsafe {
        (*output).op = llama::GGML_OP_MUL;
        (*output).src = [std::ptr::null_mut(); 10];
    }
    stream.synchronize();
    assert_eq!(floats(output), [2.0; 4]);
}

#[test]
fn nodes_reach_host_memory_on_unified_devices_only() {
    for unified in [false, true] {
        let device = register(Options { unified, ..Options::default() });
        let stream = Stream::of(&device);
        let mut tensors = Tensors::new();
        let input = tensors.floats([4, 1, 1]);
        // SAFETY: all of one live context.
        let output = unsafe { llama::ggml_add(tensors.context, input, input) };
        tensors.compute(output);
        // SAFETY: a registered device.
        let (host_type, supported) = unsafe {
            let host_type = llama::ggml_backend_dev_host_buffer_type(device.raw());
            (host_type, llama::ggml_backend_dev_supports_buft(device.raw(), host_type))
        };
        assert!(tensors.allocate(host_type));
        set(input, &[1.0f32; 4]);
        assert_eq!(supported, unified);
        if unified {
            assert_eq!(stream.submit(&tensors), llama::GGML_STATUS_SUCCESS);
            stream.synchronize();
            assert_eq!(floats(output), [2.0; 4]);
        } else {
            assert_eq!(stream.submit(&tensors), llama::GGML_STATUS_FAILED);
            assert!(device.faults()[0].contains("LAG_Host"), "{:?}", device.faults());
        }
    }
}

#[test]
fn a_product_finds_unwritten_padding() {
    for clean in [true, false] {
        let device = register(Options::default());
        let stream = Stream::of(&device);
        let tensors = Tensors::new();
        // Two slots of one matrix, with room for padding behind each; a weight tensor of its own would be cleaned.
        let row = 34 * 2;
        let arena = tensors.tensor(llama::GGML_TYPE_I8, [2 * (row + 34 * 14), 1, 1]);
        let input = tensors.floats([64, 1, 1]);
        let ids = tensors.tensor(llama::GGML_TYPE_I32, [1, 1, 1]);
        let _tensors = tensors.on(&stream);
        let slots = Tensors::new();
        let weights = slots.tensor(llama::GGML_TYPE_Q8_0, [64, 1, 2]);
        // SAFETY: the weights are described as a strided view of the arena, as slots are; the rest is of one live
        // context.
        unsafe {
            (*weights).nb[2] = row as usize + 34 * 14;
            (*weights).data = (*arena).data;
            (*weights).buffer = (*arena).buffer;
        }
        set(arena, &vec![0u8; row as usize]);
        set(input, &[1.0f32; 64]);
        set(ids, &[0i32]);
        if clean {
            set(arena, &vec![0u8; row as usize + 34 * 14]);
        }
        // SAFETY: as above.
        let output = unsafe { llama::ggml_mul_mat_id(slots.context, weights, input, ids) };
        slots.compute(output);
        let slots = slots.on(&stream);
        assert_eq!(stream.submit(&slots), llama::GGML_STATUS_SUCCESS);
        stream.synchronize();
        assert_eq!(device.faults().is_empty(), clean, "{:?}", device.faults());
        assert_eq!(floats(output)[0].is_nan(), !clean);
    }
}
