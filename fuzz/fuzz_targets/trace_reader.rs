//! Any bytes as a trace: no panic, no huge allocation, and what is accepted can be written and read again.
//! `fuzz/run trace_reader`

#![no_main]

use hobbit_core::trace::{Header, Record, TraceReader, TraceWriter};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let mut reader = match TraceReader::new(input, "fuzzed.trace") {
        Ok(reader) => reader,
        Err(error) => return assert!(error.to_string().starts_with("fuzzed.trace: ")),
    };
    let header = reader.header().clone();
    let mut records = Vec::new();
    for record in reader.by_ref() {
        match record {
            Ok(record) => records.push(record),
            Err(error) => assert!(error.to_string().starts_with("fuzzed.trace: the record at byte ")),
        }
    }
    assert!(reader.next().is_none());
    let bytes = written(&header, &records);
    let again = TraceReader::new(&bytes[..], "again.trace").expect("a header that was accepted");
    assert_eq!(again.header(), &header);
    let again: Vec<Record> = again.collect::<Result<_, _>>().expect("what was written is read");
    // As bytes: a weight may be no number.
    assert!(written(&header, &again) == bytes);
});

fn written(header: &Header, records: &[Record]) -> Vec<u8> {
    let mut writer = TraceWriter::new(Vec::new(), header).expect("a header that was accepted");
    for record in records {
        let written = match record {
            Record::Sequence => writer.sequence(),
            Record::Layer(layer) => writer.layer(layer),
            Record::Load { version, class, bytes } => writer.load(*version, *class, *bytes),
            Record::Batch { phase, n_tokens, seconds } => writer.batch(*phase, *n_tokens, *seconds),
            Record::Residents(residents) => writer.residents(residents),
            Record::Withdrawn { version, bytes } => writer.withdrawn(*version, *bytes),
            Record::Measured { host } => writer.measured(host),
        };
        written.expect("a record that was accepted");
    }
    writer.finish().expect("memory takes everything")
}
