//! TLS towards upstream servers (RFC 7858).

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::corefile::{Sources, Tls};

/// Where distributions keep the authorities that a machine trusts.
const SYSTEM_AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Reads what the configuration names.
///
/// # Errors
/// Which file is missing or unusable, for people.
pub(super) fn client(tls: &Tls, sources: &dyn Sources) -> Result<Arc<ClientConfig>, String> {
    let (text, path) = match &tls.authority {
        Some(path) => (sources.read(path)?, path.as_str()),
        None => SYSTEM_AUTHORITIES
            .iter()
            .filter(|path| Path::new(path).exists())
            .find_map(|path| Some((std::fs::read_to_string(path).ok()?, *path)))
            .ok_or("this machine has no certificate authorities; name a file of them: tls CA")?,
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates(&text, path)?);
    if roots.is_empty() {
        return Err(format!("{path} holds no usable certificate authority"));
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let config = match &tls.certificate_and_key {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates(&sources.read(certificate)?, certificate)?;
            let private = PrivateKeyDer::from_pem_slice(sources.read(key)?.as_bytes())
                .map_err(|error| format!("{key} holds no private key: {error}"))?;
            builder
                .with_client_auth_cert(chain, private)
                .map_err(|error| format!("{certificate} and {key}: {error}"))?
        }
    };
    Ok(Arc::new(config))
}

fn certificates(text: &str, path: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    CertificateDer::pem_slice_iter(text.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| format!("{path} holds no certificates in PEM: {error}"))
}
