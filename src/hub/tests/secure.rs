//! A server that has no certificate to prove who it is.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustls::pki_types::CertificateDer;
use rustls::sign::{CertifiedKey, Signer, SigningKey, SingleCertAndKey};
use rustls::{ServerConfig, ServerConnection, SignatureAlgorithm, SignatureScheme};

use super::*;

/// A key that signs with zeros.
#[derive(Debug)]
struct NoKey;

impl SigningKey for NoKey {
    fn choose_scheme(&self, _: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        Some(Box::new(Self))
    }
    fn algorithm(&self) -> SignatureAlgorithm {
        SignatureAlgorithm::ECDSA
    }
}

impl Signer for NoKey {
    fn sign(&self, _: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        Ok(vec![0; 64])
    }
    fn scheme(&self) -> SignatureScheme {
        SignatureScheme::ECDSA_NISTP256_SHA256
    }
}

/// Takes connections as a server of TLS does, with a certificate that is none; counts them.
fn impostor() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let certificate = SingleCertAndKey::from(CertifiedKey::new(vec![CertificateDer::from(vec![0u8])], Arc::new(NoKey)));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_no_client_auth().with_cert_resolver(Arc::new(certificate)));
    let count = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&count);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            counted.fetch_add(1, Ordering::SeqCst);
            let mut connection = ServerConnection::new(Arc::clone(&config)).unwrap();
            while connection.is_handshaking() && connection.complete_io(&mut stream).is_ok() {}
        }
    });
    (url, count)
}

#[test]
fn a_certificate_that_is_none_is_told_at_once() {
    let (url, count) = impostor();
    let rig = Rig::new(url.clone());
    for error in [rig.hf("a/b").unwrap_err(), rig.mu(&format!("{url}/m.gguf")).unwrap_err()] {
        assert!(error.contains("no secure connection to 127.0.0.1 (") && error.contains("give it with -m"), "{error}");
        assert!(error.contains("certificate"), "{error}");
    }
    assert_eq!(count.load(Ordering::SeqCst), 2);
    assert!(rig.memory.pauses.borrow().is_empty(), "{}", rig.memory.notes());
}

#[test]
fn a_server_without_tls_is_told_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rig = Rig::new(format!("https://{}", listener.local_addr().unwrap()));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            while stream.read(&mut [0; 4096]).is_ok_and(|n| n > 0) {}
        }
    });
    let error = rig.hf("a/b").unwrap_err();
    assert!(error.contains("no secure connection to 127.0.0.1 (") && error.contains("check the address"), "{error}");
    assert!(rig.memory.pauses.borrow().is_empty(), "{}", rig.memory.notes());
}
