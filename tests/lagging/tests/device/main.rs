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
}

#[test]
fn products_count_the_slices_they_use() {
    let device = register(Options { compute_bandwidth: 1.0, ..Options::default() });
    expert_ffn(&Stream::of(&device));
    let report = device.report();
    // Experts 0, 1, 2 and 5 of 32 rows of 68 bytes; results of 32 x 2 x 5 floats (ADD, GLU), 32 x 2 written
    // into 32 x 7 (SET_ROWS counts what it writes), 32 x 3.
    let expected = 4 * 32 * 68 + 2 * 32 * 2 * 5 * 4 + 32 * 2 * 4 + 32 * 3 * 4;
    assert_eq!((report.compute_busy, report.graph_computes), (f64::from(expected), 1));
}

#[test]
fn the_host_cannot_read_device_memory() {
    let device = register(Options::default());
    let stream = Stream::of(&device);
    let (_tensors, input, _) = doubling(&stream, 4);
    let mut pipe = [0; 2];
    // SAFETY: the kernel checks the address and refuses instead of faulting.
    let written = unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        libc::write(pipe[1], (*input).data, 16)
    };
    assert_eq!((written, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EFAULT)));
}

#[test]
fn unwritten_memory_is_nan() {
    let device = register(Options::default());
    let stream = Stream::of(&device);
    let (tensors, _, output) = doubling(&stream, 4);
    stream.submit(&tensors);
    stream.synchronize();
    assert!(floats(output).iter().all(|value| value.is_nan()));
}

#[test]
fn a_product_without_a_wait_sees_old_bytes() {
    for (waits, expected) in [(false, 2.0), (true, 20.0)] {
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
        assert_eq!(floats(output), [expected; 4], "waits: {waits}");
    }
}

#[test]
fn an_upload_without_a_wait_overwrites() {
    for (waits, expected) in [(false, 20.0), (true, 2.0)] {
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
        assert_eq!(floats(output), [expected; 4], "waits: {waits}");
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
fn when_uploads_read_host_memory() {
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
fn downloads_arrive_when_they_are_waited_for() {
    let device = register(options(Order::CopiesLate));
    let stream = Stream::of(&device);
    let (_tensors, input, _) = doubling(&stream, 4);
    set(input, &[3.0f32; 4]);
    let mut host = [0.0f32; 4];
    // SAFETY: `host` stays until the stream is synchronised.
    unsafe { llama::ggml_backend_tensor_get_async(stream.0, input, host.as_mut_ptr().cast(), 0, 16) };
    assert_eq!(host, [0.0; 4]);
    stream.synchronize();
    assert_eq!(host, [3.0; 4]);
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
fn copies_and_graphs_overlap_on_two_streams() {
    for (two, expected) in [(true, 1.0), (false, 2.0)] {
        let device = register(Options { link_bandwidth: 16.0, compute_bandwidth: 16.0, ..Options::default() });
        let (compute, other) = (Stream::of(&device), Stream::of(&device));
        let copies = if two { &other } else { &compute };
        let (tensors, _, _) = doubling(&compute, 4);
        let (_next, input, _) = doubling(&compute, 4);
        compute.submit(&tensors);
        copies.upload(input, &[1.0f32; 4]);
        compute.synchronize();
        other.synchronize();
        let report = device.report();
        assert_eq!((report.host_time, report.copy_busy, report.compute_busy), (expected, 1.0, 1.0), "two: {two}");
        assert_eq!(report.copied_bytes, 16);
        device.reset();
        assert_eq!(device.report(), lagging_device::Report::default());
    }
}

/// Of 16 bytes: at 16 bytes a second from pinned memory, at 8 from other memory, and in no time if they are few.
#[test]
fn copies_take_the_time_of_their_memory_and_size() {
    let fast = Options { link_bandwidth: 16.0, pageable_bandwidth: 8.0, ..Options::default() };
    let small = Options { small_copy_bytes: 16, link_latency: 0.5, ..fast.clone() };
    for (options, expected) in [(fast, [2.0, 1.0]), (small, [0.5, 0.5])] {
        let device = register(options);
        let stream = Stream::of(&device);
        let (_tensors, input, _) = doubling(&stream, 4);
        let mut staging = Tensors::new();
        let source = staging.floats([4, 1, 1]);
        // SAFETY: a registered device.
        assert!(staging.allocate(unsafe { llama::ggml_backend_dev_host_buffer_type(device.raw()) }));
        // SAFETY: host memory of four floats, used by this thread.
        let pinned = unsafe { std::slice::from_raw_parts((*source).data.cast::<f32>(), 4) };
        let times = [&[1.0f32; 4][..], pinned].map(|host| {
            device.reset();
            stream.upload(input, host);
            stream.synchronize();
            device.report().host_time
        });
        assert_eq!(times, expected);
    }
}

/// A blocking copy into memory that is not pinned costs a wait of its own, as does each wait for something new.
#[test]
fn waits_and_the_hosts_own_products_take_time() {
    let device =
        register(Options { link_bandwidth: 16.0, wait_latency: 0.25, host_bandwidth: 4.0, ..Options::default() });
    let stream = Stream::of(&device);
    let (_tensors, input, _) = doubling(&stream, 4);
    device.reset();
    let mut host = [[0.0f32; 4]; 2];
    for row in &mut host {
        // SAFETY: `host` stays until the stream is synchronised.
        unsafe { llama::ggml_backend_tensor_get_async(stream.0, input, row.as_mut_ptr().cast(), 0, 16) };
    }
    stream.synchronize();
    stream.synchronize();
    assert_eq!(device.report().host_time, 2.5);
    // SAFETY: a registered device; what it has under this name is such a function.
    unsafe {
        let reg = llama::ggml_backend_dev_backend_reg(device.raw());
        let work = llama::ggml_backend_reg_get_proc_address(reg, c"hobbit_device_host_work".as_ptr());
        let work: unsafe extern "C" fn(llama::ggml_backend_dev_t, u64) = std::mem::transmute(work);
        work(device.raw(), 6);
    }
    assert_eq!(device.report().host_time, 4.0);
}

#[test]
fn profiles_shrink_with_their_models() {
    let Options { memory, link_bandwidth, node_latency, .. } = Options::rtx_4090().scaled(4.0);
    assert_eq!((memory, link_bandwidth, node_latency), (6 << 30, 6.25e9, 5e-6));
    assert!(Options::orin_64gb().unified && !Options::rtx_4090().unified);
}

#[test]
fn memory_ends_where_the_options_say_and_comes_back() {
    let device = register(Options { memory: 4096, ..Options::default() });
    let stream = Stream::of(&device);
    // SAFETY: the backend is live.
    let buft = unsafe { llama::ggml_backend_get_default_buffer_type(stream.0) };
    let allocate = |n: i64| {
        let mut tensors = Tensors::new();
        tensors.floats([n, 1, 1]);
        tensors.allocate(buft).then_some(tensors)
    };
    let free = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid places.
        unsafe { llama::ggml_backend_dev_memory(device.raw(), &raw mut free, &raw mut total) };
        (free, total)
    };
    assert!(allocate(1025).is_none());
    let first = allocate(768).expect("3 of 4 KiB");
    assert_eq!(free(), (1024, 4096));
    assert!(allocate(257).is_none());
    drop(first);
    assert_eq!(free(), (4096, 4096));
    device.fail_allocations_above(1024);
    assert!(allocate(257).is_none() && allocate(256).is_some());
}

#[test]
fn graphs_fail_when_told() {
    let device = register(Options::default());
    let stream = Stream::of(&device);
    let (tensors, input, _) = doubling(&stream, 4);
    set(input, &[1.0f32; 4]);
    device.fail_graphs(0, 1, llama::GGML_STATUS_ALLOC_FAILED);
    assert_eq!(stream.submit(&tensors), llama::GGML_STATUS_ALLOC_FAILED);
    assert_eq!(stream.submit(&tensors), llama::GGML_STATUS_SUCCESS);
    device.lose();
    assert_eq!(stream.submit(&tensors), llama::GGML_STATUS_FAILED);
    assert_eq!(stream.submit(&tensors), llama::GGML_STATUS_FAILED);
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

#[test]
fn a_token_uses_a_slice_twice_only_if_it_is_alone_and_the_weights_are_quantised() {
    let (q8_0, f16, f32) = (llama::GGML_TYPE_Q8_0, llama::GGML_TYPE_F16, llama::GGML_TYPE_F32);
    let rows: [(llama::ggml_type, &[i32], bool); 6] = [
        (q8_0, &[2, 2], true),
        (q8_0, &[0, 1, 2, 2], false),
        (q8_0, &[0, 1, 1, 2], true),
        (f16, &[2, 2], false),
        (f16, &[2, 1], true),
        (f32, &[2, 2], false),
    ];
    for (dtype, ids, is_sound) in rows {
        let device = register(Options { forbids_repeats: true, ..Options::default() });
        let stream = Stream::of(&device);
        let tensors = Tensors::new();
        let n_tokens = ids.len() / 2;
        let experts = tensors.tensor(dtype, [64, 4, 3]);
        let input = tensors.floats([64, 1, n_tokens as i64]);
        let chosen = tensors.tensor(llama::GGML_TYPE_I32, [2, n_tokens as i64, 1]);
        // SAFETY: all of one live context, with shapes that fit.
        let (output, bytes) =
            unsafe { (llama::ggml_mul_mat_id(tensors.context, experts, input, chosen), llama::ggml_nbytes(experts)) };
        tensors.compute(output);
        let tensors = tensors.on(&stream);
        set(experts, &vec![0u8; bytes]);
        set(input, &vec![1.0f32; 64 * n_tokens]);
        set(chosen, ids);
        assert_eq!(stream.submit(&tensors), llama::GGML_STATUS_SUCCESS);
        stream.synchronize();
        assert_eq!(device.faults().is_empty(), is_sound, "type {dtype}, {ids:?}: {:?}", device.faults());
    }
}
