//! A device beside the host.

use super::*;

#[test]
fn experts_on_a_device_are_not_read_and_age_on_the_host() {
    let toy = toy(1, 8, 1, 2);
    let tokens = |experts: &[u16]| -> Recording {
        let sequence = experts.iter().map(|expert| vec![vec![vec![*expert]]]).collect();
        recording(&toy.record(&[sequence]))
    };
    let hits = |slots: u32, residents: &[u16], experts: &[u16]| {
        let recording = tokens(experts);
        let version = |index: &u16| Version::high(ExpertId { layer: 0, index: *index });
        let residents = residents.iter().map(version).collect();
        let device = Some(Device { slots: vec![slots], residents, expert_seconds: 0.0 });
        let (seen, outcome) = replayed(&recording, &Config { device, ..Config::recorded(&recording).unwrap() });
        let hits: Vec<bool> = seen.into_iter().map(|(_, _, hit)| hit).collect();
        assert_eq!(outcome.bytes_read, 4000 * hits.iter().filter(|hit| !**hit).count() as u64);
        hits
    };
    let (hit, miss) = (true, false);
    assert_eq!(hits(1, &[7], &[7, 7]), [hit, hit]);
    assert_eq!(hits(0, &[], &[0, 1, 2, 1, 0]), [miss, miss, miss, hit, miss], "two slots on the host");
    // The device evicts 0 for 1, and the host still has it.
    assert_eq!(hits(1, &[], &[0, 1, 0]), [miss, miss, hit]);
    // 0 stays on the device and ages on the host, which has 2 and 3 at the end. So when the device evicts it, it is
    // read again; a host that counted its uses would have it.
    assert_eq!(hits(2, &[], &[0, 1, 0, 2, 0, 3, 2, 0]), [miss, miss, hit, miss, hit, miss, hit, miss]);
}
