//! The fuzz target's body over the committed corpus, with mutations.

use kedge_pmi::check_bytes;
use kedge_test_corpus::Corpus;
use proptest::prelude::*;

#[test]
fn every_bit_of_every_message() {
    let corpus = Corpus::of("pmi", check_bytes);
    assert!(corpus.seeds().len() >= 4);
    corpus.each_bit(usize::MAX);
}

proptest! {
    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check_bytes(&bytes);
    }

    #[test]
    fn any_text(text in "(cmd=[a-z-]{1,8}[; ])?([a-z]{0,3}[=; \n]{0,2}){0,9}") {
        check_bytes(text.as_bytes());
        check_bytes(format!("{:6}{text}", text.len()).as_bytes());
    }
}
