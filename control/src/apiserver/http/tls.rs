//! TLS of the API listeners. Client certificates are optional, and one that the cluster CA did not sign is no reason to
//! end the handshake: the client gets a 401 that it can read.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme,
};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, UnixTime};

use super::authn::Identity;
use crate::pki::Pki;

/// Why TLS could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("TLS of the API server: {0}")]
    Pki(#[from] crate::pki::PkiError),
    #[error("TLS of the API server: the CA certificate is not usable: {0}")]
    Ca(String),
    #[error("TLS of the API server: {0}")]
    Rustls(#[from] rustls::Error),
}

/// Accepts connections and tells who is at the other end.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    pub(super) config: Arc<ServerConfig>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl Tls {
    pub(super) fn new(pki: &Pki) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        for ca in CertificateDer::pem_slice_iter(pki.ca_pem.as_bytes()) {
            roots.add(ca.map_err(|e| TlsError::Ca(e.to_string()))?)?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .allow_unauthenticated()
                .build()
                .map_err(|e| TlsError::Ca(e.to_string()))?;
        let (certs, key) = pki.server.der()?;
        let lenient = Arc::new(Lenient {
            inner: Arc::clone(&verifier),
        });
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(lenient)
            .with_single_cert(certs, key)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self {
            config: Arc::new(config),
            verifier,
        })
    }

    /// The client's identity when its certificate is of the cluster CA and valid now.
    pub(super) fn identify(&self, chain: Option<&[CertificateDer<'_>]>) -> Option<Identity> {
        let (leaf, intermediates) = chain?.split_first()?;
        self.verifier
            .verify_client_cert(leaf, intermediates, UnixTime::now())
            .ok()?;
        Identity::from_certificate(leaf)
    }
}

/// Lets every certificate through whose key the client holds; [`Tls::identify`] judges the chain.
#[derive(Debug)]
struct Lenient {
    inner: Arc<dyn ClientCertVerifier>,
}

impl ClientCertVerifier for Lenient {
    fn offer_client_auth(&self) -> bool {
        true
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
