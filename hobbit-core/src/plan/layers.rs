//! Placement of layers on devices.

/// The device (an index into `free`) of each layer, `None` for the CPU, and the portions to pass to llama.cpp as
/// `tensor_split`, one per device, so that it divides alike.
///
/// The first list has `n_layer + 1` entries: the output counts as layer `n_layer`. `n_gpu_layers` counts from the end,
/// the output included; negative means all. `tensor_split` has portions in any unit. Missing ones are 0, and if all are
/// 0, layers are divided by `free` memory in bytes. For a device that reports no memory the caller passes the host's,
/// as llama.cpp does.
///
/// This is the rule of `llama_model_base::load_tensors` (llama.cpp), in the same 32-bit arithmetic. Portions are not
/// divided by their sum here: llama.cpp does that, and rounding twice could move a layer.
pub fn layer_devices(
    n_layer: u32,
    n_gpu_layers: i32,
    tensor_split: &[f32],
    free: &[u64],
) -> (Vec<Option<usize>>, Vec<f32>) {
    let n_all = n_layer as usize + 1;
    let portions = portions(tensor_split, free);
    if portions.is_empty() {
        return (vec![None; n_all], portions);
    }
    let mut ends = portions.clone();
    let mut sum = 0.0f32;
    for end in &mut ends {
        sum += *end;
        *end = sum;
    }
    ends.iter_mut().for_each(|end| *end /= sum);
    let on_devices = usize::try_from(n_gpu_layers).map_or(n_all, |n| n.min(n_all));
    let start = n_all - on_devices;
    let device = |layer: usize| {
        let place = layer.checked_sub(start)? as f32 / on_devices as f32;
        // The last end is exactly 1, and a place is less.
        Some(ends.partition_point(|end| *end <= place))
    };
    ((0..n_all).map(device).collect(), portions)
}

fn portions(tensor_split: &[f32], free: &[u64]) -> Vec<f32> {
    let given = (0..free.len()).map(|device| tensor_split.get(device).copied().unwrap_or(0.0));
    let given: Vec<f32> = given.collect();
    let is_empty = |portions: &[f32]| portions.iter().all(|portion| *portion == 0.0);
    if !is_empty(&given) {
        return given;
    }
    let by_memory: Vec<f32> = free.iter().map(|bytes| *bytes as f32).collect();
    if is_empty(&by_memory) { vec![1.0; free.len()] } else { by_memory }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    /// A digit per layer, `-` for the CPU; the last is the output.
    fn drawn(n_layer: u32, n_gpu_layers: i32, tensor_split: &[f32], free: &[u64]) -> String {
        let (layers, _) = layer_devices(n_layer, n_gpu_layers, tensor_split, free);
        layers.iter().map(|device| device.map_or("-".to_owned(), |device| device.to_string())).collect()
    }

    #[test]
    fn one_device() {
        for (n_gpu_layers, expected) in
            [(-1, "00000"), (-2, "00000"), (99, "00000"), (5, "00000"), (4, "-0000"), (1, "----0"), (0, "-----")]
        {
            assert_eq!(drawn(4, n_gpu_layers, &[], &[GIB]), expected, "{n_gpu_layers}");
        }
        assert_eq!(drawn(4, 99, &[], &[]), "-----");
        assert_eq!(drawn(0, 99, &[], &[GIB]), "0");
    }

    #[test]
    fn several_devices() {
        // Places 0, 1/8 ... 7/8; a place on an end belongs to the next device.
        assert_eq!(drawn(7, 8, &[1.0, 1.0], &[GIB, 9 * GIB]), "00001111");
        assert_eq!(drawn(7, 8, &[3.0, 1.0], &[0, 0]), "00000011");
        assert_eq!(drawn(7, 8, &[], &[GIB, 3 * GIB]), "00111111");
        // Places 0, 1/5 ... 4/5 of layers 3 to 7.
        assert_eq!(drawn(7, 5, &[0.6, 0.4], &[GIB, GIB]), "---00011");
        // 0.5, 0.75 and 1 are the ends of three devices over places 0, 1/3, 2/3.
        assert_eq!(drawn(2, -1, &[2.0, 1.0, 1.0], &[1, 1, 1]), "001");
    }

    #[test]
    fn portions_of_nothing_are_skipped() {
        assert_eq!(drawn(3, -1, &[0.0, 1.0], &[GIB, GIB]), "1111");
        assert_eq!(drawn(3, -1, &[1.0], &[GIB, GIB]), "0000");
        assert_eq!(drawn(3, -1, &[1.0, 0.0, 1.0], &[GIB, GIB, GIB]), "0022");
    }

    #[test]
    fn llama_cpp_is_told_the_layers_of_the_device() {
        let split = |tensor_split: &[f32], free: &[u64]| layer_devices(3, -1, tensor_split, free).1;
        assert_eq!(split(&[3.0, 1.0], &[1, 1]), [3.0, 1.0]);
        assert_eq!(split(&[3.0, 1.0, 5.0], &[1, 1]), [3.0, 1.0]);
        assert_eq!(split(&[3.0], &[1, 1]), [3.0, 0.0]);
        assert_eq!(split(&[0.0, 0.0], &[4096, 8192]), [4096.0, 8192.0]);
        // llama.cpp would divide by zero.
        assert_eq!(split(&[], &[0, 0]), [1.0, 1.0]);
        assert_eq!(split(&[1.0], &[]), [0.0; 0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            rng_seed: prop::test_runner::RngSeed::Fixed(22),
            failure_persistence: None,
            ..ProptestConfig::with_cases(1000)
        })]

        /// Layers are in the order of the devices, as many as asked for are on one, and no device without a portion
        /// has any.
        #[test]
        fn layers_are_in_order(
            n_layer in 0..130u32,
            n_gpu_layers in -2..140i32,
            portions in prop::collection::vec(prop_oneof![Just(0.0f32), 0.01f32..10.0], 1..6),
        ) {
            let free = vec![GIB; portions.len()];
            let (layers, told) = layer_devices(n_layer, n_gpu_layers, &portions, &free);
            prop_assert_eq!(layers.len(), n_layer as usize + 1);
            prop_assert!(layers.is_sorted());
            let expected = usize::try_from(n_gpu_layers).map_or(layers.len(), |n| n.min(layers.len()));
            prop_assert_eq!(layers.iter().flatten().count(), expected);
            prop_assert!(layers.iter().flatten().all(|device| told[*device] > 0.0));
        }
    }
}
